"""What a mesh cannot do right is refused by name, with the way out, before the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_test import RULES, assert_same, compiled, data, mlp, scope, two_by_two

import tfpar

L = keras.layers


def fit(model, rows=8):
    x, y = data(rows)
    return model.fit(x, y, verbose=0)


def test_a_metric_made_outside_the_scope():
    """It would live on one device and read a fraction of its value."""
    metric = keras.metrics.MeanAbsoluteError()
    model = compiled(two_by_two(), metrics=[metric])
    with pytest.raises(ValueError, match=r"mean_absolute_error/total' was created outside"):
        fit(model)


def test_an_optimizer_made_outside_the_scope():
    optimizer = keras.optimizers.Adam()
    model = compiled(two_by_two(), optimizer=lambda: optimizer)
    with pytest.raises(ValueError, match=r"adam.*was created outside strategy.scope\(\)"):
        fit(model)


def test_compile_outside_the_scope():
    with two_by_two().scope():
        model = mlp()
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match="outside strategy.scope"):
        fit(model)


def test_a_part_of_the_model_made_outside_the_scope():
    dense = L.Dense(4)
    dense.build((None, 6))
    with two_by_two().scope():
        model = keras.Sequential([keras.Input((6,)), dense, L.Dense(1)])
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"dense.*kernel' was created outside"):
        fit(model)


def test_a_variable_that_no_layer_knows():
    """Found in the traced graph, where nothing but its handle is seen."""
    plain = tf.Variable(2.0)

    class Scale(L.Layer):
        def call(self, x):
            return x * plain

    model = compiled(
        two_by_two(), lambda: keras.Sequential([keras.Input((6,)), Scale(), L.Dense(1)])
    )
    with pytest.raises(ValueError, match="was created outside"):
        fit(model)


def test_the_variable_of_another_strategy():
    with tfpar.MeshStrategy(tfpar.Mesh(data=8)).scope():
        dense = L.Dense(4)
        dense.build((None, 6))
    with two_by_two().scope():
        model = keras.Sequential([keras.Input((6,)), dense, L.Dense(1)])
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match="another strategy"):
        fit(model)


def test_large_constants_of_a_layer_are_no_trouble():
    """DTensor refuses plain float tensors; a position table kept as a tensor is common."""
    table = tf.constant(np.random.default_rng(0).standard_normal((64, 6)), tf.float32)

    class Positions(L.Layer):
        def call(self, x):
            return x + table[: x.shape[0] or 1] if x.shape[0] else x + table[0]

    def script(strategy):
        model = compiled(
            strategy, lambda: keras.Sequential([keras.Input((6,)), Positions(), L.Dense(1)])
        )
        x, y = data(8)
        return [model.train_on_batch(x, y) for _ in range(2)]

    assert_same(script, None)


class Noise(L.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Python(L.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.py_function(lambda v: v, [x], tf.float32), x.shape)


@pytest.mark.parametrize(
    "layer, message",
    [(Noise, "RandomStandardNormal.*SeedGenerator"), (Python, "EagerPyFunc.*tf.data")],
)
def test_ops_with_a_state_of_their_own(layer, message):
    with two_by_two().scope():
        model = keras.Sequential([keras.Input((6,)), layer(), L.Dense(1)])
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match=message):
        fit(model)


@pytest.mark.parametrize(
    "x, message",
    [
        (tf.ragged.constant([[1.0, 2.0], [3.0]]), "RaggedTensor.*to_tensor"),
        (tf.sparse.eye(2, 6), "SparseTensor.*to_dense"),
        (tf.constant([["a"], ["b"]]), "string.*dataset"),
    ],
)
def test_batches_that_cannot_be_split(x, message):
    with pytest.raises(ValueError, match=message):
        two_by_two().run(lambda v: v, args=(x,))


def test_jit_compile():
    model = compiled(two_by_two(), jit_compile=True)
    with pytest.raises(ValueError, match=r"jit_compile=True.*MeshStrategy"):
        fit(model)


def test_a_rule_that_matches_nothing():
    model = compiled(two_by_two({r"upp/kernel": (None, "model")}))
    with pytest.raises(ValueError, match=r"'upp/kernel' matches no variable.*'up/kernel'"):
        fit(model)


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"up": (None, "model"), "kernel": (None, "model")}, "matched by 2 rules"),
        ({"up/kernel": ("model",)}, "1 axes.*shape .6, 8."),
        ({"down/kernel": (None, "data")}, None),
        ({"head/kernel": (None, "model")}, "1 is not a multiple of model=2"),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    strategy = two_by_two(rules)
    if message is None:
        compiled(strategy)
        return
    with pytest.raises(ValueError, match=message):
        compiled(strategy)


@pytest.mark.parametrize("bad", [None, "CPU:0", 4])
def test_no_mesh(bad):
    with pytest.raises(ValueError, match="tfpar.Mesh"):
        tfpar.MeshStrategy(bad)


def test_a_loop_of_ones_own_on_a_pipe_axis():
    strategy = tfpar.MeshStrategy(tfpar.Mesh(pipe=2, data=2, model=2))
    with pytest.raises(ValueError, match="one stage at a time"):
        strategy.run(lambda x: x + 1, args=(np.ones(4),))


def test_changing_a_variable_in_a_function_of_ones_own():
    with two_by_two(RULES).scope():
        model = mlp()

    @tf.function
    def bump():
        model.trainable_variables[0].value.assign_add(tf.ones((6, 8)))

    with pytest.raises(ValueError, match="strategy.run"):
        bump()


def test_two_strategies_and_models_do_not_disturb_each_other():
    x, y = data(16)

    def losses(model):
        return [model.train_on_batch(x, y) for _ in range(3)]

    want = losses(compiled(None))
    models = [compiled(two_by_two(RULES)), compiled(tfpar.MeshStrategy(tfpar.Mesh(data=8)))]
    got = [[], [], []]
    plain = compiled(None)
    for _ in range(3):
        for log, model in zip(got, [*models, plain]):
            log.append(model.train_on_batch(x, y))
    for log in got:
        np.testing.assert_allclose(log, want, rtol=1e-5)


def test_explain_tells_layout_bytes_and_catch():
    strategy = two_by_two(RULES)
    with scope(strategy):
        model = mlp()
    text = strategy.explain(model)
    assert "up/kernel" in text and "rule 'up/bias': ('model',) caught 1: up/bias" in text
    held = sum(v.value.shards()[0].numpy().nbytes for v in model.weights)
    whole = sum(v.numpy().nbytes for v in model.weights)
    assert f"{held:,}" in text and f"{whole:,}" in text
