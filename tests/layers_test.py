"""SplitDense: a Dense in all but where its weights live."""

import keras
import numpy as np
import pytest
from fit_test import assert_close, assert_same, compiled, data, two_by_two

import tfpar


def split_mlp(dense=tfpar.layers.SplitDense):
    keras.utils.set_random_seed(3)
    i = keras.Input((6,))
    z = dense(8, split="columns", activation="gelu", name="up")(i)
    return keras.Model(i, keras.layers.Dense(1)(dense(10, split="rows", name="down")(z)))


def plain_mlp():
    return split_mlp(lambda units, split, **kwargs: keras.layers.Dense(units, **kwargs))


def test_equals_dense():
    x, y = data(24)

    def train(strategy, build):
        model = compiled(strategy, build)
        model.fit(x, y, epochs=3, batch_size=8, shuffle=False, verbose=0)
        return model

    want, one, mesh = train(None, plain_mlp), train(None, split_mlp), train(two_by_two(), split_mlp)
    assert_close(one.get_weights(), want.get_weights(), 1e-9)
    assert_close(mesh.get_weights(), want.get_weights())
    assert mesh.get_layer("up").kernel.value.shards()[0].shape == (6, 4)
    assert mesh.get_layer("up").bias.value.shards()[0].shape == (4,)
    assert mesh.get_layer("down").kernel.value.shards()[0].shape == (4, 10)
    assert mesh.get_layer("down").bias.value.shards()[0].shape == (10,)


def test_starts_as_dense_does():
    with two_by_two().scope():
        mesh = split_mlp()
    for a, b in zip(mesh.get_weights(), plain_mlp().get_weights()):
        np.testing.assert_array_equal(a, b)


def test_saves_as_plain_dense(tmp_path):
    x, _ = data(5)
    with two_by_two().scope():
        mesh = split_mlp()
    mesh.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.get_layer("up")) is keras.layers.Dense
    assert_close(loaded.predict(x, verbose=0), mesh.predict(x, verbose=0))
    plain = plain_mlp()
    mesh.set_weights(plain.get_weights())
    assert_close(plain.predict(x, verbose=0), mesh.predict(x, verbose=0))


def test_a_three_dimensional_input():
    r = np.random.default_rng(0)
    x, y = r.standard_normal((8, 5, 6)).astype("float32"), r.standard_normal((8, 5, 1))

    def build():
        keras.utils.set_random_seed(3)
        i = keras.Input((5, 6))
        z = tfpar.layers.SplitDense(8, "columns", activation="relu")(i)
        return keras.Model(i, tfpar.layers.SplitDense(1, "rows", use_bias=False)(z))

    def script(strategy):
        model = compiled(strategy, build)
        return model.fit(x, y, verbose=0, epochs=2).history, model.get_weights()

    assert_same(script, None)


def test_bad_input():
    with pytest.raises(ValueError, match="columns.*rows.*'cols'"):
        tfpar.layers.SplitDense(4, split="cols")
    with two_by_two().scope(), pytest.raises(ValueError, match="odd.*7 is not a multiple"):
        tfpar.layers.SplitDense(7, "columns", name="odd").build((None, 6))
    with two_by_two({"both": (None, None)}).scope(), pytest.raises(ValueError, match="drop one"):
        tfpar.layers.SplitDense(8, "columns", name="both", use_bias=False).build((None, 6))
