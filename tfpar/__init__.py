"""tfpar: distribution for TensorFlow and Keras 3 beyond data parallelism, with right numbers."""

from tfpar import layers
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh, virtual_devices
from tfpar.strategy.mesh import MeshStrategy

__all__ = ["LayoutMap", "Mesh", "MeshStrategy", "layers", "virtual_devices"]
