"""ZeRO: the paper's figures, and variables on a mesh that take exactly what its formulas say."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from bytes_test import bytes_held
from fit_test import mesh, scope, strategy_on

import tfpar
from tfpar import zero
from tfpar.strategy.lowered import collectives
from tfpar.variables import ShardedVariable

L = keras.layers
O = keras.optimizers


def test_the_papers_table():
    """7.5 billion parameters over 64 devices: 120, 31.4, 16.6 and 1.9 GB (figure 1)."""
    found = [zero.bytes_per_device(7.5e9, 64, stage) / 1e9 for stage in zero.STAGES]
    assert [round(x, 1) for x in found] == [120.0, 31.4, 16.6, 1.9]


@pytest.mark.parametrize("stage", [-1, 4, True, "1", None])
def test_what_is_no_stage_is_refused(stage):
    with pytest.raises(ValueError, match="zero must be 0, 1"):
        tfpar.MeshStrategy(mesh(2), zero=stage)


@pytest.mark.parametrize(
    "shape, axes, want",
    [
        ((8, 12), (None, None), (None, "data")),  # the longest that divides
        ((6, 12), (None, "model"), ("data", "model")),  # padded: the other is taken
        ((6, 8), (None, None), (None, "data")),  # the one that divides
        ((7,), (None,), ("data",)),  # padded
        ((9, 7), (None, None), (None, "data")),  # 7 to 8 is less than 9 to 12
        ((8,), ("model",), ("model",)),  # nothing is left
        ((1, 1), (None, None), (None, None)),
        ((), (), ()),
    ],
)
def test_the_dim_that_is_split(shape, axes, want):
    assert zero.split_over_data(shape, axes, 4) == want


def even():
    keras.utils.set_random_seed(3)
    i = keras.Input((8,))
    x = L.Dense(16, activation="gelu", name="up")(i)
    return keras.Model(i, L.Dense(8, name="down")(L.LayerNormalization()(x)))


def odd():
    """Dims that 2 and 4 do not divide; a table, a convolution, an LSTM and a normalisation."""
    keras.utils.set_random_seed(3)
    i = keras.Input((5,), dtype="int32")
    x = L.Embedding(13, 6, name="table")(i)
    x = L.LSTM(5, return_sequences=True)(L.Conv1D(7, 3, name="convolution")(x))
    x = L.BatchNormalization()(L.Dense(7, "tanh", name="hidden")(x))
    return keras.Model(i, L.Dense(3, name="head")(L.GlobalAveragePooling1D()(x)))


ODD_LAYOUTS = {r"table": (None, "model"), r"hidden/bias": (None,)}


def train(build, strategy, optimizer, steps=None, rows=(8, 8, 5), **kwargs):
    with scope(strategy):
        model, optimizer = build(), optimizer()
        if steps:
            optimizer = tfpar.AccumulatingOptimizer(optimizer, steps)
        model.compile(optimizer, "mse", **kwargs)
    r = np.random.default_rng(0)
    for n in rows * 2:
        x = r.integers(0, 13, (n, 5)) if build is odd else r.standard_normal((n, 8))
        model.train_on_batch(x, r.standard_normal((n, *model.output_shape[1:])))
    return model


def assert_same(build, data, model, stage, optimizer, layouts=None, **kwargs):
    want = train(build, None, optimizer, **kwargs)
    found = train(build, strategy_on(data, model, layouts, zero=stage), optimizer, **kwargs)
    for variable, a, b in zip(want.weights, found.get_weights(), want.get_weights()):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9, err_msg=variable.path)


OPTIMIZERS = {
    "momentum": lambda: O.SGD(0.1, momentum=0.9),
    "adam": lambda: O.Adam(0.01, global_clipnorm=0.5),
    "adamw averaged": lambda: O.AdamW(
        0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=4
    ),
    "rmsprop": lambda: O.RMSprop(0.01),
    "adagrad": lambda: O.Adagrad(0.1),
    "adadelta": lambda: O.Adadelta(1.0),
    "adafactor": lambda: O.Adafactor(0.01),
    "lamb": lambda: O.Lamb(0.01),
    "muon": lambda: O.Muon(0.01),
}


@pytest.mark.parametrize(
    "name, stage, data, model",
    [
        ("adam", 1, 2, 2),
        ("adamw averaged", 3, 2, 2),
        ("rmsprop", 2, 2, 2),
        ("adafactor", 3, 4, 1),
        ("momentum", 3, 2, 2),
    ],
)
def test_equals_one_device(name, stage, data, model, float64):
    """Dims that do not divide, with tables split by width: what is padded must not be seen."""
    layouts = ODD_LAYOUTS if model > 1 else None
    assert_same(odd, data, model, stage, OPTIMIZERS[name], layouts)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("data, model", [(4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimizers(name, data, model, stage, float64):
    assert_same(odd, data, model, stage, OPTIMIZERS[name], ODD_LAYOUTS if model > 1 else None)


@pytest.mark.parametrize("stage", [1, 3])
def test_with_accumulation(stage, float64):
    assert_same(odd, 2, 2, stage, OPTIMIZERS["adam"], ODD_LAYOUTS, steps=2)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_train_step_that_mixes_gradients_and_weights(stage, float64):
    """Gradients have the shapes of their weights, padded or not."""

    class Decaying(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply([g + 0.01 * w for g, w in zip(gradients, weights)], weights)
            return {"loss": loss}

    def build():
        keras.utils.set_random_seed(3)
        i = keras.Input((8,))
        x = L.Dense(7, "tanh", kernel_constraint="max_norm", kernel_regularizer="l2")(i)
        return Decaying(i, L.Dense(3)(x))

    assert_same(build, 4, 1, stage, lambda: O.Adam(0.05))


def test_an_optimizer_of_ones_own(float64):
    """One that takes means over a weight: it must not see padding."""

    class Scaled(O.Optimizer):
        def build(self, variables):
            if not self.built:
                super().build(variables)
                self.sums = [self.add_variable_from_reference(v, "sum") for v in variables]

        def update_step(self, gradient, variable, learning_rate):
            total = self.sums[self._get_variable_index(variable)]
            gradient = tf.convert_to_tensor(gradient)
            gradient /= 1e-3 + keras.ops.mean(keras.ops.abs(gradient))
            self.assign(total, 0.5 * total + gradient)
            self.assign_sub(variable, learning_rate * total)

        def get_config(self):
            return super().get_config()

    assert_same(odd, 2, 2, 3, lambda: Scaled(0.01), ODD_LAYOUTS)


def test_saved_and_loaded_elsewhere(tmp_path, float64):
    """A file has no padding, and trains on with another mesh and another stage."""
    path = str(tmp_path / "model.keras")
    train(odd, tfpar.MeshStrategy(mesh(4), zero=3), OPTIMIZERS["adam"]).save(path)
    ends = []
    for strategy in (None, tfpar.MeshStrategy(mesh(2, 2), zero=1)):
        with scope(strategy):
            model = keras.models.load_model(path)
        r = np.random.default_rng(1)
        model.train_on_batch(r.integers(0, 13, (8, 5)), r.standard_normal((8, 3)))
        ends.append(model.get_weights())
    for a, b in zip(*ends):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_equal_the_formula(stage):
    """Weights, accumulated gradients and Adam's slots, all dims of which data=4 divides."""
    model = train(even, tfpar.MeshStrategy(mesh(4), zero=stage), O.Adam, steps=4)
    optimizer = model.optimizer
    state = [v for v in optimizer.variables if len(v.shape)] + model.trainable_variables
    want = zero.bytes_per_device(model.count_params(), 4, stage, weight=4, gradient=4, slots=8)
    np.testing.assert_array_equal(bytes_held(state, mesh(4)), int(want))


@pytest.mark.parametrize("data, model", [(4, 1), (2, 2)])
def test_padded_bytes_are_those_that_explain_shows(data, model):
    strategy = strategy_on(data, model, ODD_LAYOUTS if model > 1 else None, zero=3)
    network = train(odd, strategy, O.Adam)
    text = strategy.explain(network)
    total = int(text.split("\ntotal")[1].split()[0].replace(",", ""))
    np.testing.assert_array_equal(bytes_held(network.weights, strategy.mesh)[0], total)
    assert "padded to" in text
    for v in network.trainable_variables:
        assert isinstance(v.value, ShardedVariable)
        assert v.numpy().shape == tuple(v.shape) == tuple(v.value.shape)


def volume(stage):
    with tfpar.MeshStrategy(mesh(4), zero=stage).scope():
        model = even()
        model.compile("adam", "mse")
    with collectives() as found:
        model.train_on_batch(np.ones((8, 8)), np.ones((8, 8)))
    of_matrices = {c.kind for c in found if c.bytes >= 512}
    return sum(c.wire_bytes for c in found), of_matrices


def test_communication_of_the_stages():
    """Paper, section 7: stages 1 and 2 as data parallelism, stage 3 at most 1.5 times."""
    plain, kinds = volume(0)
    assert kinds == {"all_reduce"}
    # Sums over all dims but the last (of a normalisation) stay all-reduces: 5% here, of the vectors.
    for stage, most in [(1, 1.06), (2, 1.06), (3, 1.5)]:
        sent, kinds = volume(stage)
        assert plain / 2 < sent <= plain * most
        assert kinds == {"reduce_scatter", "all_gather"}
