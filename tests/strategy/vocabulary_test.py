"""A vocabulary split over `model`: nothing of its size crosses devices, no padding is seen."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_test import assert_close, scope, strategy_on

import tfpar
from tfpar.strategy.lowered import collectives

L = keras.layers


def network(kind, size, width=8):
    if "odd width" in kind:
        kind, width = kind.split()[0], 7
    keras.utils.set_random_seed(1)
    i = keras.Input((5,), dtype="int32")
    if kind == "dense":
        x = L.LayerNormalization()(L.Embedding(size, width, mask_zero=True, name="table")(i))
        return keras.Model(i, L.Dense(size, name="head")(x))
    table = L.ReversibleEmbedding(
        size, width, mask_zero=True, tie_weights=kind == "tied", name="table"
    )
    return keras.Model(i, table(L.LayerNormalization()(table(i)), reverse=True))


LAYOUTS = {
    "dense": tfpar.LayoutMap(
        {
            "table/emb": ("model", None),
            "head/kernel": (None, "model"),
            "head/bias": ("model",),
        },
        pad=["head/kernel", "head/bias"],
    ),
    "tied": tfpar.LayoutMap({"table/emb": ("model", None)}),
    "untied": tfpar.LayoutMap({"table/emb": ("model", None), "reverse": (None, "model")}),
}


def sentences(size, rows=16):
    r = np.random.default_rng(0)
    return r.integers(0, size, (rows, 5)), r.integers(0, size, (rows, 5))


def train(strategy, kind, size, optimizer, rows=16):
    with scope(strategy):
        model = network(kind, size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
    x, y = sentences(size, rows)
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history, model.predict(x, verbose=0)


ADAM = lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1)
RMSPROP = lambda: keras.optimizers.RMSprop(0.01)


@pytest.mark.parametrize(
    "kind, size, data, model, zero, optimizer",
    [
        ("dense", 13, 1, 4, 0, ADAM),
        ("dense", 12, 2, 2, 0, RMSPROP),
        ("tied", 13, 2, 2, 3, ADAM),
        ("tied", 15, 1, 4, 0, RMSPROP),
        ("untied", 13, 2, 2, 0, ADAM),
        ("untied", 10, 1, 4, 1, ADAM),
        ("tied odd width", 13, 2, 2, 3, ADAM),
    ],
)
def test_equals_one_device(kind, size, data, model, zero, optimizer, float64):
    """Weights, losses, accuracies and predictions, of vocabularies that do not divide too.

    In float64 DTensor's own cross-entropy of split classes is 0.
    """
    rows = 16 if zero else 13  # a last batch that data does not divide
    want = train(None, kind, size, optimizer, rows)
    found = train(
        strategy_on(data, model, LAYOUTS[kind.split()[0]], zero=zero), kind, size, optimizer, rows
    )
    assert found[2].shape[-1] == size
    assert_close(found, want, 1e-9)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "tied"])
def test_no_table_and_no_logits_cross_devices(kind, policy):
    """One all-reduce of the rows, two or three of a number a token; nothing of the vocabulary."""
    size, rows, width = 1021, 8, 8
    keras.config.set_dtype_policy(policy)
    try:
        with strategy_on(1, 4, LAYOUTS[kind]).scope():
            model = network(kind, size, width)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("adam", loss, metrics=["accuracy"])
        with collectives() as found:
            model.train_on_batch(*sentences(size, rows))
    finally:
        keras.config.set_dtype_policy("float32")
    tokens = rows * 5
    of_rows = [c for c in found if c.bytes > 8 * tokens]
    assert {c.kind for c in of_rows} == {"all_reduce"}
    assert len(of_rows) == 2  # what is looked up, and the gradient of the logits' input
    assert all(c.bytes <= 4 * tokens * width for c in of_rows)
    # In the loss: largest, sum of exponentials, the label's logit. In the accuracy: two.
    # (Integers go as 8 bytes.)
    assert sum(c.bytes in (4 * tokens, 8 * tokens) for c in found) == 5


def test_files_have_no_padding(tmp_path):
    path = str(tmp_path / "model.keras")
    with strategy_on(1, 4, LAYOUTS["dense"]).scope():
        model = network("dense", 13)
    assert model.get_layer("head").kernel.value.shards()[0].shape == (8, 4)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert loaded.get_layer("head").kernel.shape == (8, 13)
    x, _ = sentences(13)
    assert_close(model.predict(x, verbose=0), loaded.predict(x, verbose=0))


def test_other_losses_see_the_logits_without_padding(float64):
    """A loss that nobody taught the padding gets whole logits."""

    def script(strategy):
        with scope(strategy):
            model = network("dense", 13)
            model.compile(ADAM(), keras.losses.CategoricalCrossentropy(from_logits=True))
        x, y = sentences(13)
        model.fit(x, np.eye(13)[y], batch_size=8, verbose=0, shuffle=False)
        return model.get_weights()

    assert_close(script(strategy_on(2, 2, LAYOUTS["dense"])), script(None), 1e-9)


def test_the_first_of_equal_logits(float64):
    """As tf.argmax: also of -0 and 0, and on any shard."""
    x = np.zeros((8, 12))
    x[1, 5] = x[1, 7] = 3.0
    x[2] = -0.0
    x[3, 3:] = -1
    x[4, :9] = -2
    strategy = strategy_on(2, 2)

    def step(x):
        x = tfpar.constrain(x, ("data", "model"))
        return keras.ops.argmax(x, axis=-1), keras.ops.argmax(x, axis=-1, keepdims=True)

    found, kept = strategy.run(step, args=(x,))
    np.testing.assert_array_equal(found, keras.ops.argmax(x, axis=-1))
    np.testing.assert_array_equal(kept[:, 0], found)


def test_negative_ids_count_from_the_end(float64):
    table = np.random.default_rng(0).standard_normal((10, 4))
    ids = np.array([[-1, 0, 3], [9, -10, -4], [0, 1, 2], [7, 8, 9]])
    strategy = strategy_on(2, 2, {"table": ("model", None)})
    with strategy.scope():
        layer = L.Embedding(10, 4, name="table")
        layer.build()
    layer.embeddings.assign(table)
    np.testing.assert_array_equal(strategy.run(layer, args=(ids,)), table[ids])


def test_ids_that_the_table_does_not_have(float64):
    """Also those of the padding: 10 rows on 4 devices are stored as 12."""
    strategy = strategy_on(1, 4, {"table": ("model", None)})
    with strategy.scope():
        layer = L.Embedding(10, 4, name="table")
        layer.build()
    rows = strategy.run(layer, args=(np.array([[9, 10], [-10, -11], [0, 99]]),))
    np.testing.assert_array_equal(np.isnan(rows[..., 0]), [[0, 1], [0, 1], [0, 1]])


def test_a_layer_that_cannot_be_padded_is_refused():
    layouts = tfpar.LayoutMap({"e/kernel": (None, "model")}, pad=["e/kernel"])
    with strategy_on(1, 4, layouts).scope(), pytest.raises(ValueError, match="cannot be padded"):
        keras.Sequential([keras.Input((3,)), L.EinsumDense("ab,bc->ac", (6,), name="e")])


def test_padding_is_for_layers_whatever_an_optimizer_calls_its_variables():
    """Adafactor's rows and columns have "kernel" in their paths, and are no Dense layer's."""
    layouts = tfpar.LayoutMap({"kernel": (None, "model")}, pad=["kernel"])
    with strategy_on(1, 4, layouts).scope():
        model = keras.Sequential([keras.Input((6,)), L.Dense(5, name="head")])
        model.compile(keras.optimizers.Adafactor(), "mse")
    model.train_on_batch(np.ones((4, 6)), np.ones((4, 5)))
    assert model.get_layer("head").kernel.value.shards()[0].shape == (6, 2)


def test_a_padded_kernel_with_a_whole_bias(float64):
    """No rule for the bias: the logits are gathered, and right."""
    layouts = tfpar.LayoutMap({"head/kernel": (None, "model")}, pad=["head/kernel"])
    found = train(strategy_on(2, 2, layouts), "dense", 13, ADAM)
    assert_close(found, train(None, "dense", 13, ADAM), 1e-9)


def test_padding_names_a_rule():
    with pytest.raises(ValueError, match=r"pad names no rules: \['b'\]"):
        tfpar.LayoutMap({"a": (None,)}, pad=["b"])


def test_the_raw_cross_entropy_is_refused_in_float64(float64):
    def loss(y, logits):
        op = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits
        found = op(features=tf.reshape(logits, [-1, 13]), labels=tf.reshape(y, [-1])).loss
        return tf.reshape(found, [8, 5])

    with strategy_on(2, 2).scope():
        model = network("dense", 13)
        model.compile("adam", lambda y, z: loss(tf.cast(y, tf.int32), z))
    with pytest.raises(tfpar.UnsupportedStep, match="wrong where the classes are split"):
        model.train_on_batch(*sentences(13, 8))


@pytest.mark.parametrize("zero", [0, 3])
def test_initial_values_are_those_of_one_device(zero):
    """Padded over `model`, split over `data`: for the same seed, the same values."""
    with strategy_on(2, 4, LAYOUTS["untied"], zero=zero).scope():
        found = network("untied", 13)
    for variable, want in zip(found.weights, network("untied", 13).get_weights()):
        np.testing.assert_array_equal(variable.numpy(), want)
        held = variable.value.shards()[0].shape.num_elements()
        assert variable.path.startswith("layer_norm") or held <= want.size / 2
