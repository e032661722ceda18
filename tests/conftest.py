"""One TensorFlow process with 8 virtual CPU devices serves all tests that need no other set-up."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tfpar

tfpar.virtual_devices(8)
