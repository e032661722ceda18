"""Keras layers that know how they are split over a mesh."""

from tfpar.layers.dense import SplitDense

__all__ = ["SplitDense"]
