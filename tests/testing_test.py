"""assert_same_training: it passes what is right, and says where what is wrong parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.testing import assert_same_training, relative_error


def mlp():
    i = keras.Input((5,))
    z = keras.layers.Dense(8, "tanh", name="hidden")(i)
    return keras.Model(i, keras.layers.Dense(1, name="head")(z))


def rows(n=19):
    r = np.random.default_rng(0)
    return r.standard_normal((n, 5)).astype("float32"), r.standard_normal((n, 1)).astype("float32")


def strategy(**layouts):
    mesh = tfpar.Mesh(data=2, model=2, devices=[f"CPU:{i}" for i in range(4)])
    return tfpar.MeshStrategy(mesh, layouts)


def check(build=mlp, data=None, **kwargs):
    kwargs = {"optimizer": "adam", "loss": "mse", "batch_size": 8, **kwargs}
    where = kwargs.pop("strategy", None) or strategy()
    return assert_same_training(build, data or rows(), where, **kwargs)


def test_gives_the_largest_errors():
    worst = check(metrics=["mae"], epochs=2)
    assert set(worst) == {"logs", "weights", "optimizer", "outputs"}
    assert all(0 <= error < 2e-5 for error in worst.values())


def test_trains_with_fit_too():
    check(use_fit=True, epochs=2, compile_args={"steps_per_execution": 2})


def test_takes_batches_of_changing_shapes():
    r = np.random.default_rng(1)

    def build():
        i = keras.Input((None, 4))
        z = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(6, "tanh")(i))
        return keras.Model(i, keras.layers.Dense(1)(z))

    batches = [
        (r.standard_normal((n, t, 4)), r.standard_normal((n, 1))) for n, t in ((4, 3), (5, 7))
    ]
    check(build, batches)


def test_takes_a_model_that_compiles_itself_and_optimizers_in_every_form():
    def compiled():
        model = mlp()
        model.compile(keras.optimizers.RMSprop(0.01), "mae")
        return model

    check(compiled)
    for optimizer in ("rmsprop", keras.optimizers.Nadam(0.01), lambda: keras.optimizers.Adam(0.1)):
        check(optimizer=optimizer)


def test_tells_a_wrong_forward_pass_at_the_first_step():
    class Off(keras.layers.Layer):
        def call(self, x):
            return x * (1.5 if tf.distribute.has_strategy() else 1.0)

    def build():
        i = keras.Input((5,))
        return keras.Model(i, keras.layers.Dense(1)(Off()(i)))

    with pytest.raises(
        AssertionError, match=r"step 1 \(epoch 1, batch 1 of 3, 8 rows\), first in lo"
    ):
        check(build)


def test_tells_wrong_gradients_by_the_variable():
    class Wrong(keras.Model):
        def train_step(self, batch):
            x, y = batch[:2]
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            if tf.distribute.has_strategy():
                gradients[2] = gradients[2] * 3
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    def build():
        plain = mlp()
        return Wrong(plain.inputs, plain.outputs)

    with pytest.raises(AssertionError) as error:
        check(build, optimizer="sgd")
    text = str(error.value)
    assert "step 1" in text and "'head/kernel'" in text and "'hidden/kernel'" not in text
    assert "logs to" in text and "likely causes" in text


def test_tells_wrong_inference():
    class Off(keras.layers.Layer):
        def call(self, x, training=False):
            return x if training or not tf.distribute.has_strategy() else x + 1

    def build():
        i = keras.Input((5,))
        return keras.Model(i, Off()(keras.layers.Dense(1)(i)))

    with pytest.raises(AssertionError, match="after training, first in evaluate's loss"):
        check(build)


def test_nan_is_no_equality():
    assert relative_error([np.nan], [np.nan]) == np.inf
    assert relative_error([1.0], [1.0 + 2e-6]) == pytest.approx(1e-6, rel=1e-3)
    assert relative_error(np.zeros(3), np.zeros(4)) == np.inf


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(build=mlp()), "build must be a function"),
        (dict(build=lambda: 3), "must return a keras.Model"),
        (dict(strategy=tfpar.Mesh(data=8)), "must be a tf.distribute.Strategy"),
        (dict(batch_size=0), "batch_size must be a positive int; received 0"),
        (dict(epochs=1.5), "epochs must be a positive int; received 1.5"),
        (dict(tolerance=0), "tolerance must be above 0"),
        (dict(data=np.zeros((3, 5))), "data must be a tuple"),
        (dict(data=(np.zeros((3, 5)), np.zeros((4, 1)))), "same rows"),
    ],
)
def test_bad_arguments_are_refused(change, words):
    change = dict(change)
    with pytest.raises(ValueError, match=words):
        if "data" in change:
            assert_same_training(mlp, change["data"], strategy(), loss="mse")
        else:
            check(change.pop("build", mlp), **change)


def test_must_be_called_outside_the_scope():
    with strategy().scope(), pytest.raises(ValueError, match="outside of strategy.scope"):
        check()
