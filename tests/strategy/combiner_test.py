"""DTensor's combiner of all-reduces gives wrong numbers; MeshStrategy switches it off.

The combiner moves all-reduces, and with them the reads of variables, past assignments: optimizers
with state then train on stale values. Plain SGD looks fine, so no test by SGD alone sees it.
"""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfpar
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


WITHOUT_THE_CURE = f"""
import os, keras, tfpar
from tfpar.strategy import rules
rules.switch_off_what_is_wrong = lambda: None
os.environ[{SWITCH!r}] = "1"
tfpar.virtual_devices(4)
import combiner_test
combiner_test.train(lambda: keras.optimizers.Adam(0.01))
"""


def alone(program):
    """Runs a program in a process of its own: the switch is read once."""
    here = pathlib.Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])}
    environment.pop(SWITCH, None)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_without_the_cure_adam_is_wrong():
    """Should this fail one day, TensorFlow has mended its combiner and the cure can go."""
    done = alone(WITHOUT_THE_CURE)
    assert done.returncode != 0 and "parted from one device" in done.stderr, done.stderr


USED_EARLY = """
import keras, tfpar
import tensorflow as tf
from tensorflow.experimental import dtensor
tfpar.virtual_devices(4)
dtensor.is_dtensor(tf.zeros(()))
import combiner_test
combiner_test.train(lambda: keras.optimizers.Adam(0.01))
"""


def test_dtensor_may_be_used_before_the_first_strategy():
    """It reads the switch then: a question whether a tensor is a DTensor once undid the cure."""
    done = alone(USED_EARLY)
    assert done.returncode == 0, done.stderr


USED_TOO_EARLY = """
import tensorflow as tf
from tensorflow.experimental import dtensor
dtensor.is_dtensor(tf.zeros(()))
import tfpar
tfpar.MeshStrategy(tfpar.Mesh())
"""


def test_dtensor_used_before_the_import_is_refused():
    done = alone(USED_TOO_EARLY)
    assert done.returncode != 0 and "Import tfpar first" in done.stderr, done.stderr
