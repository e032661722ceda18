"""One TensorFlow process with 8 virtual CPU devices serves all tests that need no other set-up."""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
for folder in ("strategy",):  # helpers that several test files share
    sys.path.insert(0, str(pathlib.Path(__file__).parent / folder))

import tfpar  # noqa: E402

tfpar.virtual_devices(8)
