"""Unsupported versions and settings are refused at import with a message that tells the way out."""

import os
import subprocess
import sys

import pytest

from tfpar import _versions

GOOD = {"tensorflow": "2.21.0", "keras": "3.15.1"}


def test_what_is_installed_here_is_supported():
    _versions.check()


@pytest.mark.parametrize("installed", [GOOD, {"tensorflow": "2.21.1rc0", "keras": "3.15.0.dev2"}])
@pytest.mark.parametrize("python", [(3, 11), (3, 13)])
def test_supported(python, installed):
    _versions.check(python, installed, {})


@pytest.mark.parametrize(
    "python, changes, environ, words",
    [
        ((3, 10), {}, {}, ["Python >=3.11,<3.14", "3.10"]),
        ((3, 14), {}, {}, ["3.14"]),
        ((3, 11), {"tensorflow": "2.20.0"}, {}, ["tensorflow >=2.21,<2.22", "2.20.0", "=2.21.*"]),
        ((3, 11), {"tensorflow": None}, {}, ["tensorflow", "not installed", "pip install"]),
        ((3, 11), {"keras": "3.16.0"}, {}, ["keras >=3.15,<3.16", "3.16.0"]),
        ((3, 11), {}, {"KERAS_BACKEND": "jax"}, ["KERAS_BACKEND", "'jax'"]),
        ((3, 11), {}, {"TF_USE_LEGACY_KERAS": "1"}, ["TF_USE_LEGACY_KERAS", "Keras 3"]),
    ],
)
def test_unsupported(python, changes, environ, words):
    with pytest.raises(ImportError) as error:
        _versions.check(python, {**GOOD, **changes}, environ)
    for word in words:
        assert word in str(error.value)


def test_a_backend_from_the_configuration_file_is_refused():
    with pytest.raises(ImportError, match="'torch'.*keras.json"):
        _versions.check_backend("torch")


def test_the_import_itself_refuses():
    done = subprocess.run(
        [sys.executable, "-c", "import tfpar"],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "ImportError: tfpar trains Keras on TensorFlow" in done.stderr
