"""Layouts of activations, and what a transformer block then sends: Megatron's pattern."""

import keras
import numpy as np
import pytest
from fit_test import assert_close, mesh, scope, strategy_on

import tfpar
from tfpar.strategy.lowered import collectives

L = keras.layers
WIDTH, LENGTH, ROWS = 16, 8, 4
PAYLOAD = 4 * ROWS * LENGTH * WIDTH  # of an activation, float32


def model(fused=False, dropout=0.0, length=LENGTH, blocks=1):
    """Blocks of pre-norm attention and MLP between two projections."""
    keras.utils.set_random_seed(1)
    i = keras.Input((length, 6))
    x = L.Dense(WIDTH, name="enter")(i)
    for k in range(blocks):
        y = L.LayerNormalization(name=f"norm_a_{k}")(x)
        if fused:
            qkv = tfpar.layers.FusedQKV(4, 4, name=f"qkv_{k}")(y)
            q, key, v = tfpar.layers.unfuse(qkv)
            scores = keras.ops.softmax(keras.ops.einsum("bqhd,bkhd->bhqk", q, key) / 2)
            y = L.Reshape((-1, WIDTH))(keras.ops.einsum("bhqk,bkhd->bqhd", scores, v))
            y = L.Dense(WIDTH, name=f"out_{k}")(y)
        else:
            y = L.MultiHeadAttention(4, 4, name=f"attention_{k}")(y, y)
        x = x + L.Dropout(dropout)(y)
        y = L.Dense(24, "gelu", name=f"up_{k}")(L.LayerNormalization(name=f"norm_b_{k}")(x))
        x = x + L.Dropout(dropout)(L.Dense(WIDTH, name=f"down_{k}")(y))
    return keras.Model(i, L.Dense(2, name="head")(L.LayerNormalization(name="leave")(x)))


def layouts(build, degree, sequence=False):
    ends = ("enter", "leave") if sequence else None
    return tfpar.LayoutMap.auto(build, mesh(model=degree), sequence=ends)


def data(length=LENGTH, rows=ROWS):
    r = np.random.default_rng(0)
    x = r.standard_normal((rows, length, 6)).astype("float32")
    return x, r.standard_normal((rows, length, 2)).astype("float32")


def sent(build, degree, sequence=False):
    """(kinds forward, kinds backward, bytes on the wire) of whole activations in a step."""
    with strategy_on(1, degree, layouts(build, degree, sequence)).scope():
        network = build()
        network.compile("adam", "mse")
    with collectives() as found:
        network.train_on_batch(*data())
    found = [c for c in found if c.bytes == PAYLOAD]
    first = next(k for k, c in enumerate(found) if "gradient_tape" in c.cause or "AddN" in c.cause)
    kinds = [c.kind for c in found]
    return kinds[:first], kinds[first:], sum(c.wire_bytes for c in found)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_a_block_makes_four_all_reduces(fused, degree):
    """Two forward, two backward (Shoeybi et al. 2019, section 3), whatever the model axis."""
    forward, backward, _ = sent(lambda: model(fused), degree)
    assert forward == ["all_reduce"] * 2
    assert backward == ["all_reduce"] * 2


@pytest.mark.parametrize("degree", [2, 4])
def test_sequence_parallelism_has_the_same_volume(degree):
    """Reduce-scatters and all-gathers in place of all-reduces (Korthikanti et al. 2022).

    At its ends one more gather each: `leave` makes the sequence whole, and so does the gradient at
    `enter`.
    """
    _, _, plain = sent(lambda: model(fused=True), degree)
    forward, backward, split = sent(lambda: model(fused=True), degree, sequence=True)
    assert sorted(forward) == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    assert sorted(backward) == ["all_gather"] * 3 + ["reduce_scatter"] * 2
    assert split == plain + 2 * PAYLOAD * (degree - 1) / degree


def test_sequence_parallelism_of_separate_projections():
    """DTensor sums the gradients of query, key and value before it can scatter them: one all-reduce
    stays, in place of a reduce-scatter."""
    _, backward, _ = sent(model, 4, sequence=True)
    assert sorted(backward) == ["all_gather"] * 3 + ["all_reduce"] + ["reduce_scatter"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_equals_one_device(fused, sequence, float64):
    """Normalisation weights too, of whose gradient each device has a part."""

    def script(strategy):
        with scope(strategy):
            network = model(fused, blocks=2)
            optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=0.5)
            network.compile(optimizer, "mse", metrics=["mae"])
        x, y = data(rows=11)  # the last batch does not divide
        logs = network.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        return logs, network.get_weights(), network.predict(x, verbose=0)

    maps = layouts(lambda: model(fused, blocks=2), 2, sequence)
    assert_close(script(strategy_on(2, 2, maps)), script(None), 1e-9)


def test_whole_weights_stay_equal_on_all_devices():
    """Case 38: a normalisation between split sequences."""
    build = lambda: model(blocks=2)
    with strategy_on(2, 2, layouts(build, 2, sequence=True)).scope():
        network = build()
        network.compile("rmsprop", "mse")
    network.fit(*data(rows=8), epochs=3, verbose=0)
    for variable in network.weights:
        if "norm" in variable.path or variable.path.endswith("leave/gamma"):
            first, *others = variable.value.shards()
            for other in others:
                np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_dropout_and_mixed_precision(policy):
    """It trains, in any precision; masks of shards of the sequence are independent."""
    keras.config.set_dtype_policy(policy)
    try:
        build = lambda: model(dropout=0.2)
        with strategy_on(2, 2, layouts(build, 2, sequence=True), zero=2).scope():
            network = build()
            network.compile(keras.optimizers.Adam(0.01), "mse")
        x, y = data(rows=16)
        losses = network.fit(x, y * 0 + x[..., :2], epochs=12, batch_size=8, verbose=0).history
        assert losses["loss"][-1] < 0.7 * losses["loss"][0]
    finally:
        keras.config.set_dtype_policy("float32")


def test_masks_differ_between_shards_of_a_sequence():
    strategy = strategy_on(2, 2)
    with strategy.scope():
        dropout = L.Dropout(0.5, seed=1)
    x = np.ones((4, 64, 3), "float32")

    def step(x):
        x = tfpar.constrain(x, ("data", "model", None))
        return dropout(x, training=True)

    kept = np.asarray(strategy.run(step, args=(x,))) > 0
    assert 0.35 < kept.mean() < 0.65
    for a, b in [(kept[:2], kept[2:]), (kept[:, :32], kept[:, 32:])]:
        assert 0.25 < (a == b).mean() < 0.75


def test_constrain_in_a_functional_model(tmp_path, float64):
    """There it is an Identity layer; a file has no word of tfpar."""

    def build():
        keras.utils.set_random_seed(0)
        i = keras.Input((8, 6))
        x = tfpar.constrain(L.Dense(4, name="a")(i), ("data", "model", None))
        x = tfpar.constrain(
            L.LayerNormalization()(x), [("data", "model", None), ("data", None, None)]
        )
        return keras.Model(i, L.Dense(2, name="b")(x))

    def script(strategy):
        with scope(strategy):
            network = build()
            network.compile("adam", "mse")
        network.fit(*data(rows=8), batch_size=4, verbose=0, shuffle=False)
        network.save(tmp_path / "m.keras")
        return network.get_weights()

    assert_close(script(strategy_on(2, 2)), script(None), 1e-9)
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert {type(layer) for layer in loaded.layers} <= {
        L.InputLayer,
        L.Dense,
        L.Identity,
        L.LayerNormalization,
    }


def test_constrain_does_nothing_without_a_mesh():
    x = np.ones((2, 3))
    assert tfpar.constrain(x, ("data", None)) is x


@pytest.mark.parametrize(
    "axes, words",
    [
        (("data", "model"), r"is for 2 dims; received a tensor of shape \(4, 7, 6\)"),
        (
            ("data", "model", None),
            "cannot be split over model=2, which does not divide 7; pad it to 8",
        ),
        (("data", "data", None), "an axis may split one dim only"),
        (("data", "pipe", None), "unknown axis 'pipe'"),
        ([("data", None, None), ("data", None)], "one rank"),
        ([], "one rank"),
    ],
)
def test_constraints_that_do_not_fit(axes, words):
    with pytest.raises(ValueError, match=words):
        strategy_on(2, 2).run(lambda x: tfpar.constrain(x, axes), args=(np.ones((4, 7, 6)),))


def test_a_sequence_that_does_not_divide_is_refused():
    build = lambda: model(length=7)
    with strategy_on(1, 4, layouts(build, 4, sequence=True)).scope():
        network = build()
        network.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"rule '.*' cannot be split|which does not divide 7"):
        network.train_on_batch(*data(length=7))


@pytest.mark.parametrize(
    "rules, words",
    [
        ({"nothing/output": ("data", None)}, "'nothing/output' matches no layer"),
        (
            {"up_0/output": ("data", None)},
            r"is for 2 dims; 'up_0/output' has shapes \[\(4, 8, 24\)\]",
        ),
        ({"up_0/input": (None,) * 3, "up_./input": (None,) * 3}, "matched by 2 rules"),
    ],
)
def test_rules_for_activations_that_do_not_fit(rules, words):
    with strategy_on(2, 2, rules).scope():
        network = model()
        network.compile("adam", "mse")
    with pytest.raises(ValueError, match=words):
        network.train_on_batch(*data())
