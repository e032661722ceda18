"""Which versions tfpar supports, and what it says at import where they do not fit.

DTensor's rules and Keras' training loop change from one minor version to the next; what tfpar
promises was tested on the versions below.
"""

import os
import sys
from importlib import metadata

PYTHON = ((3, 11), (3, 14))
SUPPORTED = {"tensorflow": ((2, 21), (2, 22)), "keras": ((3, 15), (3, 16))}

_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")}


def check(python=None, installed=None, environ=None):
    """Refuses, before TensorFlow and Keras are imported, what tfpar does not run on.

    Args:
      python: the interpreter's (major, minor).
      installed: package -> version or None, for "tensorflow" and "keras".
      environ: the environment.

    Raises:
      ImportError: an unsupported version, another Keras backend, or legacy tf.keras.
    """
    python = python or sys.version_info[:2]
    installed = installed or {name: _installed(name) for name in SUPPORTED}
    environ = os.environ if environ is None else environ
    if not _between(python, PYTHON):
        raise ImportError(f"tfpar needs Python {_range(PYTHON)}; this is {_text(python)}")
    for name, bounds in SUPPORTED.items():
        version = installed[name]
        if version is None or not _between(_minor(version), bounds):
            have = f"version {version} is installed" if version else "it is not installed"
            raise ImportError(
                f"tfpar needs {name} {_range(bounds)}; {have}. "
                f"Install it with: pip install '{name}=={_text(bounds[0])}.*'"
            )
    backend = environ.get("KERAS_BACKEND")
    if backend not in (None, "", "tensorflow"):
        raise ImportError(
            f"tfpar trains Keras on TensorFlow; KERAS_BACKEND is {backend!r}. Unset it or set it "
            'to "tensorflow" before Keras is imported'
        )
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ImportError(
            "tfpar works with Keras 3; TF_USE_LEGACY_KERAS makes tf.keras Keras 2. Unset it before "
            "TensorFlow is imported"
        )


def check_backend(backend):
    """Refuses a Keras that runs on another backend by its configuration file.

    Raises:
      ImportError: names the backend.
    """
    if backend != "tensorflow":
        raise ImportError(
            f"tfpar trains Keras on TensorFlow; Keras runs on {backend!r} (see KERAS_BACKEND and "
            "~/.keras/keras.json). Set KERAS_BACKEND=tensorflow before Keras is imported"
        )


def _installed(name):
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _minor(version):
    return tuple(int(part) for part in version.split(".")[:2])


def _between(version, bounds):
    return bounds[0] <= tuple(version) < bounds[1]


def _text(version):
    return ".".join(map(str, version))


def _range(bounds):
    return f">={_text(bounds[0])},<{_text(bounds[1])}"
