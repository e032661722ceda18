"""DTensor's combiner of all-reduces gives wrong numbers; MeshStrategy switches it off.

The combiner moves all-reduces, and with them the reads of variables, past assignments: optimizers
with state then train on stale values. Plain SGD looks fine, so no test by SGD alone sees it.
"""

import os

import keras
import numpy as np
import pytest

import tfpar
from tfpar.strategy import rules
from tfpar.testing import assert_same_training

SWITCH = "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION"


def build():
    i = keras.Input((6,))
    z = keras.layers.Dense(8, activation="tanh")(i)
    z = keras.layers.Dense(7, activation="tanh")(z)
    return keras.Model(i, keras.layers.Dense(1)(z))


def train(optimizer):
    r = np.random.default_rng(0)
    data = r.standard_normal((32, 6)).astype("float32"), r.standard_normal((32, 1))
    strategy = tfpar.MeshStrategy(tfpar.Mesh(data=4, devices=[f"CPU:{i}" for i in range(4)]))
    assert_same_training(build, data, strategy, optimizer=optimizer, loss="mse", batch_size=8)


OPTIMIZERS = [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Nadam]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_with_state_are_right(optimizer):
    assert os.environ.get(SWITCH) in (None, "0")
    train(lambda: optimizer(0.01))


def test_without_the_cure_adam_is_wrong(monkeypatch):
    """Should this fail one day, TensorFlow has mended its combiner and the cure can go."""
    monkeypatch.setattr(rules, "switch_off_what_is_wrong", lambda: None)
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(AssertionError, match="parted from one device"):
        train(lambda: keras.optimizers.Adam(0.01))
