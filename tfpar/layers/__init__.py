"""Keras layers that know how they are split over a mesh."""

from tfpar.layers.dense import SplitDense
from tfpar.layers.embedding import SplitEmbedding
from tfpar.layers.fused import FusedDense, FusedQKV, unfuse, unstack

__all__ = ["FusedDense", "FusedQKV", "SplitDense", "SplitEmbedding", "unfuse", "unstack"]
