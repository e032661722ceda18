"""Scaling rules, warm-up and the gradient noise scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar import scaling


def test_rules():
    assert scaling.linear(0.1, 256, 64) == pytest.approx(0.4)
    assert scaling.square_root(0.1, 256, 64) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="base_batch must be above 0; received 0"):
        scaling.linear(0.1, 32, 0)


def test_warm_up_rises_and_hands_over():
    schedule = scaling.WarmUp(keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.5), 4, 0.2)
    got = [float(schedule(step)) for step in (0, 2, 4, 14)]
    np.testing.assert_allclose(got, [0.2, 0.6, 1.0, 0.5], rtol=1e-6)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert float(again(14)) == pytest.approx(0.5) and float(
        scaling.WarmUp(0.3, 2)(9)
    ) == pytest.approx(0.3)
    for change in (dict(updates=0), dict(start=2.0)):
        with pytest.raises(ValueError, match="received"):
            scaling.WarmUp(**{"learning_rate": 0.1, "updates": 3, **change})


class Distance(keras.layers.Layer):
    """Half the squared distance of a row to a point: its gradient is their difference."""

    def build(self, shape):
        self.point = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return keras.ops.sum(keras.ops.square(self.point - x), axis=-1, keepdims=True) / 2


@pytest.mark.parametrize("mesh", [None, (4, 1)])
def test_the_noise_scale_of_a_known_distribution(mesh, tmp_path):
    """Rows of mean (1, 0, 0) and variance 4 per value: noise 12, signal 1, whatever the sizes."""
    r = np.random.default_rng(0)
    x = (r.standard_normal((6000, 3)) * 2 + [1.0, 0, 0]).astype("float32")
    devices = [f"CPU:{i}" for i in range(4)]
    strategy = tf.distribute.get_strategy()
    if mesh:
        mesh = tfpar.Mesh(data=mesh[0], model=mesh[1], devices=devices)
        strategy = tfpar.MeshStrategy(mesh)
    with strategy.scope():
        model = keras.Sequential([Distance()])
        optimizer = tfpar.AccumulatingOptimizer(keras.optimizers.SGD(0.0), 3, measure_noise=True)
        model.compile(optimizer, loss=lambda y, y_pred: y_pred[:, 0])
    noise = scaling.NoiseScale(str(tmp_path), decay=0.995)
    assert "not known yet" in str(noise)
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[noise])
    assert noise.value == pytest.approx(12, rel=0.35)
    assert noise.batch == 24 and "a window holds 24" in str(noise)
    assert list(tmp_path.iterdir())


def test_words_depend_on_the_batch():
    noise = scaling.NoiseScale()
    noise._sums, noise.batch = np.array([100.0, 1.0, 1.0]), 20.0
    assert "would pay: twice" in str(noise)
    noise.batch = 900.0
    assert "would not pay" in str(noise)


def test_noise_needs_an_optimizer_that_measures_it():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="measure_noise=True.*received SGD"):
        model.fit(np.ones((4, 2)), np.ones((4, 1)), callbacks=[scaling.NoiseScale()], verbose=0)
