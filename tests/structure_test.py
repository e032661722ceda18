"""LayoutMap.auto: what it splits is read from the computation, whatever layers are called."""

import keras
import numpy as np
import pytest

import tfpar
from tfpar import structure

L = keras.layers
MESH = tfpar.Mesh(data=2, model=4)


def splits(build, degree=4, **kwargs):
    """{path: dim that is split} of the choice for a model."""
    choice = structure.choose(structure.read(build, **kwargs), degree)
    return {path: axes.index("model") for path, axes in choice.axes.items()}


def test_pairs_of_dense_layers():
    def build():
        i = keras.Input((12,))
        x = L.Dense(16, "gelu", name="x0")(i)
        x = L.LayerNormalization(name="n")(L.Dense(12, name="x1")(x))
        return keras.Model(i, L.Dense(3, name="x2")(x))

    assert splits(build) == {"x0/kernel": 1, "x0/bias": 0, "x1/kernel": 0}


def test_a_chain_without_normalisation_alternates():
    """Every second kernel by columns: a tensor is split along one dim only."""

    def build():
        i = keras.Input((20,))
        x = i
        for k, units in enumerate((40, 36, 32, 28)):
            x = L.Dense(units, "relu", name=f"x{k}")(x)
        return keras.Model(i, x)

    found = splits(build)
    assert found["x0/kernel"] == 1 and found["x1/kernel"] == 0
    assert found["x2/kernel"] == 1 and found["x3/kernel"] == 0
    assert "x1/bias" not in found


def test_gated_units_go_together():
    def build():
        i = keras.Input((5, 12))
        x = L.LayerNormalization()(i)
        y = keras.ops.silu(L.Dense(16, name="x0")(x)) * L.Dense(16, name="x1", use_bias=False)(x)
        return keras.Model(i, L.LayerNormalization()(L.Dense(12, name="x2")(y)))

    found = splits(build)
    assert found == {"x0/kernel": 1, "x0/bias": 0, "x1/kernel": 1, "x2/kernel": 0}


def attention(heads, kv_heads=None, size=4, value_size=None):
    def build():
        i = keras.Input((6, 12))
        x = L.LayerNormalization()(i)
        if kv_heads is None:
            layer = L.MultiHeadAttention(heads, size, value_dim=value_size, name="x")
        else:
            layer = L.GroupQueryAttention(size, heads, kv_heads, name="x")
        return keras.Model(i, L.LayerNormalization()(i + layer(x, x, use_causal_mask=True)))

    return build


def test_attention_is_split_by_heads():
    found = splits(attention(8, value_size=3))
    assert found == {
        "x/query/kernel": 1,
        "x/query/bias": 0,
        "x/key/kernel": 1,
        "x/key/bias": 0,
        "x/value/kernel": 1,
        "x/value/bias": 0,
        "x/attention_output/kernel": 0,
    }


def test_heads_that_do_not_divide_stay_whole():
    """The size of a head would divide, but scores would be summed over devices."""
    choice = structure.choose(structure.read(attention(6, size=8)), 4)
    assert choice.axes == {}
    assert "6 is not a multiple of model=4" in "\n".join(choice.reasons)


@pytest.mark.parametrize("kv_heads, split", [(4, True), (8, True), (2, False), (1, False)])
def test_few_key_and_value_heads_stay_whole(kv_heads, split):
    found = splits(attention(8, kv_heads))
    assert found["x/query/kernel"] == 1 and found["x/attention_output/kernel"] == 0
    assert ("x/key/kernel" in found) == ("x/value/kernel" in found) == split


def vocabulary(size, tied):
    def build():
        i = keras.Input((6,), dtype="int32")
        table = L.ReversibleEmbedding(size, 12, tie_weights=tied, name="x")
        return keras.Model(i, table(L.LayerNormalization()(table(i)), reverse=True))

    return build


def test_vocabularies_are_split_and_padded():
    assert splits(vocabulary(32, tied=True)) == {"x/embeddings": 0}
    assert splits(vocabulary(32, tied=False)) == {"x/embeddings": 0, "x/reverse_embeddings": 1}
    layouts = tfpar.LayoutMap.auto(vocabulary(33, tied=True), MESH)
    assert dict(layouts.items()) == {"^x/embeddings$": ("model", None)}
    with tfpar.MeshStrategy(MESH, layouts).scope():
        model = vocabulary(33, tied=True)()
    assert model.get_layer("x").embeddings.value.shards()[0].shape == (9, 12)


def test_a_small_table_is_not_padded():
    """2 rows, such as those of segments, would become 4."""
    assert splits(vocabulary(2, tied=True)) == {}


def test_what_ops_forbid_stays_whole():
    def build():
        i = keras.Input((8, 8, 4))
        x = L.Conv2D(8, 3, name="convolution")(i)
        x = L.Flatten()(L.BatchNormalization()(x))
        x = L.Dense(16, "softmax", name="softmax")(x)
        a, b = keras.ops.split(L.Dense(16, name="cut")(x), 2, axis=-1)
        return keras.Model(i, L.Dense(3, name="head")(L.LayerNormalization()(a * b)))

    choice = structure.choose(structure.read(build), 4)
    text = "\n".join(choice.reasons)
    assert choice.axes == {}
    for reason in ("used by Conv2D", "normalised by a softmax", "cut into parts"):
        assert reason in text


def test_fused_projections():
    def build():
        i = keras.Input((6, 12))
        x = L.LayerNormalization()(i)
        q, k, v = tfpar.layers.unfuse(tfpar.layers.FusedQKV(8, 4, 4, name="qkv")(x))
        scores = keras.ops.softmax(keras.ops.einsum("bqhd,bkhd->bhqk", q, k))
        y = L.Reshape((-1, 32))(keras.ops.einsum("bhqk,bkhd->bqhd", scores, v))
        x = L.LayerNormalization()(L.Dense(12, name="out")(y))
        gate, up = tfpar.layers.unstack(tfpar.layers.FusedDense(16, 2, name="gated")(x))
        return keras.Model(i, L.LayerNormalization()(L.Dense(12, name="down")(gate * up)))

    assert splits(build) == {
        "qkv/kernel": 1,
        "qkv/bias": 0,
        "out/kernel": 0,
        "gated/kernel": 1,
        "gated/bias": 1,
        "down/kernel": 0,
    }


def test_a_subclassed_model_with_given_inputs():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = L.Dense(16, "relu", name="a"), L.Dense(4, name="b")
            self.norm = L.LayerNormalization()

        def call(self, x):
            return self.norm(self.b(self.a(x["x"])))

    batch = {"x": np.zeros((3, 6), "float32")}
    with pytest.raises(ValueError, match="give a batch of them as inputs="):
        tfpar.LayoutMap.auto(Net, MESH)
    model = Net()
    model(batch)
    found = splits(model, inputs=batch)
    assert {path.split("/", 1)[-1]: dim for path, dim in found.items()} == {
        "a/kernel": 1,
        "a/bias": 0,
        "b/kernel": 0,
    }


def test_reading_a_function_leaves_no_trace():
    """The model that is built next has the seeds and names that it would have had."""

    def build():
        return keras.Sequential([keras.Input((4,)), L.Dense(8), L.Dropout(0.1), L.Dense(4)])

    number = lambda model: int(model.layers[0].name.rpartition("_")[2])
    build()
    keras.utils.set_random_seed(0)
    want = build()
    keras.utils.set_random_seed(0)
    tfpar.LayoutMap.auto(build, MESH)
    found = build()
    assert number(found) == number(want) + 2  # two Dense layers further
    for a, b in zip(found.get_weights(), want.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_reading_makes_no_values():
    """A model larger than any memory here: 4 TB of weights."""

    def build():
        i = keras.Input((2**20,))
        return keras.Model(i, L.Dense(2**20, name="b")(L.Dense(2**19, "relu", name="a")(i)))

    assert splits(build) == {"a/kernel": 1, "a/bias": 0, "b/kernel": 0}


def test_blocks_share_their_rules_and_reasons():
    def build():
        i = keras.Input((12,))
        x = i
        for k in range(3):
            y = L.Dense(16, "relu", name=f"block_{k}_up")(L.LayerNormalization(name=f"n_{k}")(x))
            x = x + L.Dense(12, name=f"block_{k}_down")(y)
        return keras.Model(i, x)

    layouts = tfpar.LayoutMap.auto(build, MESH)
    assert dict(layouts.items()) == {
        r"^block_\d+_up/kernel$": (None, "model"),
        r"^block_\d+_up/bias$": ("model",),
        r"^block_\d+_down/kernel$": ("model", None),
    }
    assert layouts.explanation.count("split ") == 1 and "3 x split" in layouts.explanation


def test_rules_are_exact_where_blocks_differ():
    axes = {"b_1/k": ("model", None)}
    assert structure.rules(axes, ["b_0/k", "b_1/k"]) == {"^b_1/k$": ("model", None)}


def test_without_a_model_axis_nothing_is_split():
    assert len(tfpar.LayoutMap.auto(attention(8), tfpar.Mesh(data=8))) == 0


def test_what_is_no_model():
    with pytest.raises(ValueError, match="must be a built Keras model or a function"):
        tfpar.LayoutMap.auto("model", MESH)


@pytest.mark.parametrize("sequence", ["a", ("a",), ("a", "b", "c")])
def test_a_sequence_is_a_pair_of_patterns(sequence):
    with pytest.raises(ValueError, match="sequence must be two patterns"):
        tfpar.LayoutMap.auto(attention(8), MESH, sequence=sequence)
