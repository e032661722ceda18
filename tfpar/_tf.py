"""Every private TensorFlow and Keras name that tfpar uses, each with its reason.

An upgrade of TensorFlow or Keras touches this file alone: nothing else in tfpar imports from
``tensorflow.python``, ``tensorflow.dtensor`` or ``keras.src`` (a test holds this).
"""

import contextlib

import keras

# What Keras is building while a variable is created: the stack's callers tell the weights of
# layers from the variables of optimizers, metrics and seed generators, and name their path.
from keras.src.backend.common import global_state as _global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.name_scope import current_path as _current_path

# Where Keras scatters values, as confusion matrices do, and where it finds the largest of them.
from keras.src.backend.tensorflow import core, numpy

# The class in which Keras turns a step into a compiled function (`_make_function`,
# `make_predict_function`) and builds a model from its first batch (`_maybe_symbolic_build`); and the
# iterator in which it asks the strategy for its data.
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator

# The base classes of convolution layers, whose filters DTensor cannot leave split.
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv

# Where Keras divides a loss by its rows, tokens or weights (`reduce_weighted_values`).
from keras.src.losses import loss as losses

# How a Functional model calls its layers, keeps their arguments and returns its outputs: a stage of a
# pipeline does the same.
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from keras.src.ops.symbolic_arguments import SymbolicArguments

# Where Keras computes the norm of all gradients, some of which may lie on other stages of a pipeline.
from keras.src.optimizers import base_optimizer as _base_optimizer

# The class that holds `compile` and `get_compile_config`: `keras.Model` only inherits them, and
# Keras compares a model's `compile` with this one to tell whether the user has overridden it.
from keras.src.trainers.trainer import Trainer

# Whether DTensor's device, which reads its switches once, has been made.
from tensorflow.dtensor.python import api as _dtensor_api

# What a MirroredStrategy consists of: keys that tell collectives apart, the launcher of one replica's
# collectives, and the values of all replicas as one.
from tensorflow.python.distribute.cross_device_utils import (
    CollectiveKeys,
    CollectiveReplicaLauncher,
)

# The base classes of a strategy: `tf.distribute.Strategy` is public, what a strategy of one's own
# must implement is not.
from tensorflow.python.distribute.distribute_lib import ReplicaContextBase, StrategyExtendedV1
from tensorflow.python.distribute.distribute_utils import regroup
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# The programs that DTensor lowers steps to are kept by the eager context alone.
from tensorflow.python.eager.context import context as _context

# A variable read outside a step is recorded on gradient tapes as TensorFlow's own reads are.
from tensorflow.python.eager.record import record_operation, stop_recording
from tensorflow.python.eager.tape import variable_accessed

CONVOLUTIONS = (BaseConv, BaseConvTranspose, BaseDepthwiseConv, BaseSeparableConv)

__all__ = [
    "CONVOLUTIONS",
    "CollectiveKeys",
    "CollectiveReplicaLauncher",
    "Functional",
    "MirroredExtended",
    "ReplicaContextBase",
    "StrategyExtendedV1",
    "SymbolicArguments",
    "TFEpochIterator",
    "TensorFlowTrainer",
    "Trainer",
    "core",
    "creating",
    "dtensor_has_started",
    "function_def",
    "function_names",
    "get_keras_mask",
    "innermost",
    "losses",
    "numpy",
    "operation_fn",
    "record_operation",
    "reduced_already",
    "reduces_already",
    "regroup",
    "set_keras_mask",
    "stop_recording",
    "unpack_singleton",
    "updating_part",
    "variable_accessed",
    "without_overwriting",
    "without_traces",
]


def dtensor_has_started():
    """Whether anyone has used DTensor in this process."""
    return _dtensor_api._dtensor_singleton is not None


def function_names():
    """The names of all functions that TensorFlow holds, lowered ones among them."""
    return _context().list_function_names()


def function_def(name):
    """The `FunctionDef` proto of a function that TensorFlow holds."""
    return _context().get_function_def(name)


def creating(name):
    """What the variable `name` that is being created belongs to.

    Returns:
      (path, owner): its Keras path, such as "block_1/dense/kernel", and the layer, optimizer,
      metric or seed generator whose variable it is, or None.
    """
    stack = _global_state.get_global_attribute("name_scope_stack") or []
    prefix = _current_path()
    path = f"{prefix}/{name}" if prefix else name
    others = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.random.SeedGenerator)
    callers = [entry.caller for entry in stack if entry.caller is not None]
    for kind in (others, keras.layers.Layer):
        found = [caller for caller in callers if isinstance(caller, kind)]
        if found:
            return path, found[-1]
    return path, None


@contextlib.contextmanager
def without_traces():
    """Leaves no trace of the models built inside: names are given out as if they never were."""
    tracker = _global_state.GLOBAL_STATE_TRACKER
    before = dict(tracker.__dict__)
    for name in ("object_name_uids", "global_seed_generator", "uninitialized_variables"):
        tracker.__dict__.pop(name, None)
    if "object_name_uids" in before:
        tracker.object_name_uids = before["object_name_uids"].copy()
    try:
        yield
    finally:
        tracker.__dict__.clear()
        tracker.__dict__.update(before)


def innermost(optimizer):
    """The optimizer inside a `LossScaleOptimizer`, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


@contextlib.contextmanager
def reduced_already(optimizer):
    """Has `optimizer` take gradients as they are, already summed over all replicas."""
    optimizer._all_reduce_sum_gradients = list
    try:
        yield
    finally:
        del optimizer._all_reduce_sum_gradients


def reduces_already(optimizer):
    """Whether `optimizer` is inside `reduced_already`."""
    return "_all_reduce_sum_gradients" in vars(optimizer)


@contextlib.contextmanager
def without_overwriting(optimizer):
    """Keeps `optimizer` from a condition that several replicas cannot enter; yields what it does.

    Yields:
      (frequency in updates or None, a function that overwrites variables with their average).
    """
    frequency = optimizer.ema_overwrite_frequency if optimizer.use_ema else None
    optimizer.ema_overwrite_frequency, kept = None, optimizer.ema_overwrite_frequency
    try:
        yield frequency, optimizer._overwrite_model_variables_with_average_value
    finally:
        optimizer.ema_overwrite_frequency = kept


@contextlib.contextmanager
def updating_part(optimizer, places, norm=None, finite=None):
    """Has a Keras optimizer update some of its weights, as part of an update of all of them.

    Args:
      optimizer: a Keras optimizer, or a `LossScaleOptimizer` around one.
      places: which of its weights, by their place.
      norm: the norm of the gradients of all weights; None if it is not needed.
      finite: whether the gradients of all weights are finite; None if it is not needed.
    """
    inner = innermost(optimizer)
    shown = {"_trainable_variables": [inner._trainable_variables[place] for place in places]}
    averages = getattr(inner, "_model_variables_moving_average", None)
    if inner.use_ema and averages:
        shown["_model_variables_moving_average"] = [averages[place] for place in places]
    kept = {name: vars(inner)[name] for name in shown}
    stock = _base_optimizer.global_norm
    vars(inner).update(shown)
    if norm is not None:
        _base_optimizer.global_norm = lambda gradients: norm
    if finite is not None:
        vars(optimizer)["check_finite"] = lambda gradients: finite
    try:
        yield
    finally:
        vars(inner).update(kept)
        _base_optimizer.global_norm = stock
        vars(optimizer).pop("check_finite", None)
