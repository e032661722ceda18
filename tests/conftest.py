"""One TensorFlow process with 8 virtual CPU devices serves all tests that need no other set-up."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import pytest

import tfpar

tfpar.virtual_devices(8)


@pytest.fixture
def float64():
    """Layers and data in float64, where what is left of an error is no rounding."""
    for set_default in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_default("float64")
    yield
    for set_default in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_default("float32")
