"""tfpar: distribution for TensorFlow and Keras 3 beyond data parallelism, with right numbers."""

from tfpar import _versions

__version__ = "0.1.0"

_versions.check()

import keras

_versions.check_backend(keras.backend.backend())

from tfpar import layers, scaling, zero
from tfpar.accumulation import AccumulatingOptimizer
from tfpar.denominators import weigh
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh, virtual_devices
from tfpar.pipeline.blame import StageError
from tfpar.pipeline.model import Pipeline
from tfpar.strategy.activations import constrain
from tfpar.strategy.mesh import MeshStrategy
from tfpar.strategy.mirrored import MirroredStrategy
from tfpar.strategy.rules import UnsupportedStep

__all__ = [
    "AccumulatingOptimizer",
    "LayoutMap",
    "Mesh",
    "MeshStrategy",
    "MirroredStrategy",
    "Pipeline",
    "StageError",
    "UnsupportedStep",
    "constrain",
    "layers",
    "scaling",
    "virtual_devices",
    "weigh",
    "zero",
]
