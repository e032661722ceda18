"""What calls cost: FLOPs by hand, and what measuring must leave alone."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfpar.pipeline import costs
from tfpar.pipeline.costs import ELEMENT, counted, crossing, measured, together
from tfpar.pipeline.graph import Graph


def graph_of(shape, *stack, dtype="float32"):
    """The graph of a model of layers one after the other."""
    return Graph(keras.Sequential([keras.Input(shape, dtype=dtype), *stack]))


def flops(shape, layer, dtype="float32", **kwargs):
    (cost,) = counted(graph_of(shape, layer, dtype=dtype), **kwargs)
    return cost.forward


@pytest.fixture
def products_alone(monkeypatch):
    monkeypatch.setattr(costs, "ELEMENT", 0)


# FLOPs by hand: two for each multiply-add, and ELEMENT for each element read or written.


def test_dense():
    (cost,) = counted(graph_of((16,), layers.Dense(32)), rows=8)
    product = 8 * 16 + 16 * 32 + 8 * 32
    bias = 8 * 32 + 32 + 8 * 32
    assert cost.forward == 2 * 8 * 16 * 32 + ELEMENT * (product + bias)
    assert cost.backward == 2 * cost.forward
    assert cost.weights == 4 * (16 * 32 + 32)
    assert cost.activations == 4 * 8 * 32


def test_dims_known_at_run_time_only(products_alone):
    found = flops((None, 16), layers.Dense(32), rows=4, length=10)
    assert found == 2 * (4 * 10) * 16 * 32


def test_attention(products_alone):
    """Four projections of width 16 x 16, the scores and their product with the values."""
    x = keras.Input((12, 16))
    attention = layers.MultiHeadAttention(2, 8)
    (cost,) = counted(Graph(keras.Model(x, attention(x, x))), rows=8)
    assert cost.forward == 4 * 2 * (8 * 12) * 16 * 16 + 2 * 2 * (8 * 2) * 12 * 12 * 8


@pytest.mark.parametrize(
    "shape, layer, made, filter_",
    [
        ((9, 9, 4), layers.Conv2D(8, 3), 7 * 7 * 8, 3 * 3 * 4),
        ((9, 9, 4), layers.Conv2D(8, 3, strides=2), 4 * 4 * 8, 3 * 3 * 4),
        ((9, 9, 4), layers.Conv2D(8, 3, groups=2), 7 * 7 * 8, 3 * 3 * 2),
        ((9, 4), layers.Conv1D(8, 3), 7 * 8, 3 * 4),
        ((5, 5, 5, 4), layers.Conv3D(8, 3), 27 * 8, 27 * 4),
        ((9, 9, 4), layers.DepthwiseConv2D(3), 7 * 7 * 4, 3 * 3),
        # Each element of the input meets the whole filter of its channel.
        ((5, 5, 4), layers.Conv2DTranspose(8, 3, strides=2), 5 * 5 * 4, 3 * 3 * 8),
        ((3, 3, 3, 4), layers.Conv3DTranspose(8, 3, strides=2), 27 * 4, 27 * 8),
    ],
)
def test_convolutions(products_alone, shape, layer, made, filter_):
    assert flops(shape, layer, rows=2) == 2 * 2 * made * filter_


@pytest.mark.parametrize("equation, output", [("abc,cd->abd", (None, 7)), ("...c,cd->...d", 7)])
def test_einsum_layers(products_alone, equation, output):
    assert flops((5, 6), layers.EinsumDense(equation, output), rows=8) == 2 * 8 * 5 * 6 * 7


@pytest.mark.parametrize(
    "equation, shapes, combinations",
    [
        ("aecd,abcd->acbe", [(2, 3, 4, 5), (2, 6, 4, 5)], 2 * 3 * 4 * 5 * 6),
        ("...ij,...jk->...ik", [(2, 3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        ("a...,a...->...", [(2, 3), (2, 3)], 2 * 3),
    ],
)
def test_einsum_ops(equation, shapes, combinations):
    with tf.Graph().as_default() as graph:
        tf.einsum(equation, *(tf.compat.v1.placeholder("float32", shape) for shape in shapes))
        found = [costs._combinations(op) for op in graph.get_operations() if op.type == "Einsum"]
    assert found == [combinations]


def test_reductions_count_what_they_read():
    dims = 2
    found = flops((10, 10, 4), layers.GlobalAveragePooling2D(), rows=3)
    assert found == ELEMENT * 3 * (10 * 10 * 4 + 4) + ELEMENT * dims


def test_lookups_count_what_they_find():
    """Not the table, however large."""
    few, many = (flops((16,), layers.Embedding(n, 4), "int32") for n in (10, 100_000))
    assert few == many < ELEMENT * 100_000


def test_loops_count_each_step(products_alone):
    """The recurrent product of an LSTM, in a while loop, runs once for each of 20 steps."""
    width = 32
    once = 2 * 8 * width * 4 * width
    steps = flops((20, width), layers.LSTM(width)) / (2 * once)
    assert 20 <= steps <= 21  # Keras traces one more, to learn what a step gives


def test_branches_and_functions(products_alone):
    """Of two branches the dearer one counts."""

    class Chosen(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(16, use_bias=False)

        def call(self, x):
            inner = tf.function(lambda x: self.dense(x), autograph=False)
            return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: inner(x))

        def compute_output_shape(self, shape):
            return shape

    assert flops((16,), Chosen()) == 2 * 8 * 16 * 16


# Passes and bytes.


def test_nothing_flows_back_in_front_of_the_first_weight():
    frozen = layers.Dense(4, trainable=False)
    stack = (layers.Rescaling(2.0), frozen, layers.Dense(4), layers.ReLU(), layers.Dense(4))
    found = counted(graph_of((4,), *stack))
    assert [cost.backward > 0 for cost in found] == [False, False, True, True, True]
    assert all(cost.forward > 0 for cost in found)


def test_shared_weights_are_held_once():
    shared = layers.Dense(4)
    first, second, other = counted(graph_of((4,), shared, shared, layers.Dense(4)))
    assert first.weights == other.weights == 4 * 20
    assert second.weights == 0 and second.forward == first.forward


def test_models_inside():
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(32), layers.Dense(16)])
    nested = Graph(keras.Sequential([keras.Input((16,)), inner, layers.Dense(8)]))
    flat = graph_of((16,), layers.Dense(32), layers.Dense(16), layers.Dense(8))
    assert [call.name.count("/") for call in nested.calls] == [1, 1, 0]
    assert counted(nested) == counted(flat)
    assert len(measured(nested, repeats=1)) == 3


class Opaque(layers.Layer):
    """Runs on batches of 3 only."""

    def call(self, x):
        if x.shape[0] not in (None, 3):
            raise RuntimeError("not on its own")
        return x


def test_calls_that_cannot_be_traced():
    graph = graph_of((4,), layers.Dense(4), Opaque(name="opaque"))
    with pytest.warns(UserWarning, match=r"\['opaque'\] could not be counted"):
        found = counted(graph)
    assert found[1].forward == ELEMENT * 8 * 4
    with pytest.raises(ValueError, match="'opaque' cannot be run on its own"):
        measured(graph, repeats=1)


def test_crossing():
    """A residual travels on beside the branch; an output that is ready early travels to the end."""
    x = keras.Input((4,))
    a = layers.Dense(4, name="a")(x)
    b = layers.Dense(2, name="b")(a)
    c = layers.Dense(4, name="c")(b)
    d = layers.Add(name="d")([a, c])
    e = layers.Dense(1, name="e")(layers.Concatenate(name="join")([d, x]))
    graph = Graph(keras.Model(x, [e, b]))
    assert [call.name for call in graph.calls] == ["a", "b", "c", "d", "join", "e"]
    a, b, c, d, join = (4 * 8 * n for n in (4, 2, 4, 4, 8))
    assert crossing(graph) == [0, a, a + b, a + b + c, b + d, b + join]
    assert crossing(graph, rows=1) == [n // 8 for n in crossing(graph)]


def test_crossing_counts_the_width_of_types():
    graph = graph_of((4,), layers.Rescaling(1.0, dtype="float16"), layers.Dense(4))
    assert crossing(graph) == [0, 2 * 8 * 4]


# State.


def test_shared_statistics_stay_together():
    norm = layers.BatchNormalization()
    assert together(graph_of((4,), norm, layers.Dense(4), norm, layers.Dense(4))) == [(0, 2)]


def test_shared_seeds_stay_together():
    drop = layers.Dropout(0.5)
    assert together(graph_of((4,), drop, layers.Dense(4), drop)) == [(0, 2)]


def test_layers_that_share_state_stay_together():
    """Two layers, one generator."""

    class Noise(layers.Layer):
        def __init__(self, seeds):
            super().__init__()
            self.seeds = seeds

        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x), seed=self.seeds)

    seeds = keras.random.SeedGenerator(1)
    assert together(graph_of((4,), Noise(seeds), layers.Dense(4), Noise(seeds))) == [(0, 2)]


def test_shared_statistics_inside_models_stay_together():
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(4)]
    )
    assert together(graph_of((4,), inner, inner)) == [(1, 4)]


def test_shared_weights_may_part():
    dense, frozen = layers.Dense(4), layers.BatchNormalization(trainable=False)
    assert together(graph_of((4,), dense, frozen, dense, frozen)) == []
    assert together(graph_of((4,), layers.Dropout(0.5), layers.Dropout(0.5))) == []


# Measuring.


def test_measuring_changes_nothing():
    stack = (layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2))
    graph = graph_of((4,), *stack)
    before = [np.array(v) for v in graph.model.variables]
    random = np.random.get_state()[1].copy()
    found = measured(graph, repeats=2)
    counted(graph)
    for variable, value in zip(graph.model.variables, before):
        np.testing.assert_array_equal(variable, value)
    np.testing.assert_array_equal(np.random.get_state()[1], random)
    assert all(math.isfinite(t) and t >= 0 for cost in found for t in cost)
    assert [cost[2:] for cost in found] == [cost[2:] for cost in counted(graph)]


def test_the_slowest_is_the_slowest():
    """A product 4,000 times as large as the others, counted and measured."""
    stack = layers.Dense(8), layers.Dense(2048), layers.Dense(2048), layers.Dense(8), layers.ReLU()
    graph = graph_of((64, 8), *stack)
    for found in (counted(graph), measured(graph, repeats=3)):
        assert np.argmax([cost.forward for cost in found]) == 2
        assert np.argmax([cost.backward for cost in found]) == 2


def test_the_backward_pass_is_run_beside_the_whole_forward_pass(monkeypatch):
    """Regression: what linear layers make was no output of the function that took their gradient, so
    TensorFlow pruned it, and half of their backward pass was missing in the difference."""
    seen = []

    def medians(functions, values, repeats):
        seen.extend(tf.function(fn)(values) for fn in functions)
        return 1.0, 3.0, 8.0

    monkeypatch.setattr(costs, "_medians", medians)
    (cost,) = measured(graph_of((4,), layers.Dense(3)))
    assert (cost.forward, cost.backward) == (2.0, 5.0)
    _, forward, (made, gradients) = seen
    np.testing.assert_array_equal(forward[0], made[0])
    assert [tuple(g.shape) for g in gradients] == [(4, 3), (3,), (8, 4)]


@pytest.mark.parametrize("repeats", [0, 1.5])
def test_refused_repeats(repeats):
    with pytest.raises(ValueError, match=f"repeats={repeats}"):
        measured(graph_of((4,), layers.Dense(3)), repeats=repeats)


def test_other_inputs_than_floats():
    """Whole numbers look up row 0, whatever the table; text and truth values run as well."""
    ids = keras.Input((6,), dtype="int32")
    looked_up = layers.Embedding(3, 4)(ids)
    x = layers.Flatten()(looked_up * keras.ops.cast(ids > 0, "float32")[..., None])
    graph = Graph(keras.Model(ids, layers.Dense(2)(x)))
    assert len(measured(graph, repeats=1)) == len(counted(graph)) == len(graph.calls)


def test_mixed_precision():
    policy = keras.DTypePolicy("mixed_bfloat16")
    graph = graph_of((4,), layers.Dense(4, dtype=policy), layers.Dense(4, dtype=policy))
    first, _ = counted(graph)
    assert first.weights == 4 * 20 and first.activations == 2 * 8 * 4
    assert all(cost.backward >= 0 for cost in measured(graph, repeats=1))


def test_masks_are_left_out():
    x = keras.Input((6,), dtype="int32")
    y = layers.LSTM(4)(layers.Embedding(5, 4, mask_zero=True)(x))
    graph = Graph(keras.Model(x, y))
    assert all(cost.forward > 0 for cost in counted(graph))
    assert len(measured(graph, repeats=1)) == len(graph.calls)
