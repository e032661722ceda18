"""Fixtures of the conformance suite."""

import keras
import pytest


@pytest.fixture
def float64():
    """Layers and data in float64, where what is left of an error is no rounding."""
    for set_default in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_default("float64")
    yield
    for set_default in (keras.config.set_floatx, keras.config.set_dtype_policy):
        set_default("float32")
