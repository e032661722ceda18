"""Layouts of activations: `constrain`, and rules of a LayoutMap for the outputs of layers."""

import functools

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf
from tfpar.layouts import Constraint
from tfpar.variables import in_step


def constrain(x, axes, gradient=None):
    """Fixes how an activation is split over the mesh; its values stay as they are.

    DTensor chooses layouts for what lies between weights. Where another choice is better, say so:
    between the split layers of a transformer, LayerNormalization and Dropout work on a shard of the
    sequence if it is split over `model` (Korthikanti et al. 2022, sequence parallelism)::

        x = tfpar.constrain(x, ("data", "model", None))  # (batch, sequence, features)

    It works in `call` of a layer, in a `train_step`, and on the symbolic tensors of a functional
    model, where it is an `Identity` layer; without a MeshStrategy it does nothing. For layers that
    you cannot change, use a rule of the LayoutMap, such as
    `{r"layer_norm/output": ("data", "model", None)}`.

    DTensor lets layouts spread to the ops before and behind. A list of layouts, which `x` takes one
    after the other, keeps both sides apart: `[split, whole]` is for an `x` that is made split and
    used whole.

    Args:
      x: a tensor.
      axes: one of None (whole), "data", "model" per dim of `x`, or a list of such tuples. Where
        `data` does not divide the rows of a batch, they stay whole, as the batch does.
      gradient: the same for the gradient; by default `axes`, a list of them reversed.

    Returns:
      `x`, laid out so.

    Raises:
      ValueError: another rank, an unknown axis or one used twice, a dim that its axis does not
        divide.
    """
    constraint = Constraint.of(axes, gradient)
    if isinstance(x, keras.KerasTensor):
        _check_rank(x, constraint, "constrain")
        layer = keras.layers.Identity()
        layer.constraint_of_output = constraint
        return layer(x)
    return _constrain(x, constraint, "constrain") if in_step() else x


def _check_rank(x, constraint, source):
    if constraint.rank != len(x.shape):
        raise ValueError(
            f"{source} is for {constraint.rank} dims; received a tensor of shape {tuple(x.shape)}"
        )


def _constrain(x, constraint, source):
    """`x` laid out; once, however many layers ask for it."""
    known = x.__dict__.setdefault("_tfpar_laid_out", {}) if hasattr(x, "__dict__") else {}
    if constraint not in known:
        known[constraint] = _lay_out(x, constraint, source)
    return known[constraint]


def _lay_out(x, constraint, source):
    _check_rank(x, constraint, source)
    mesh = tf.distribute.get_strategy().step_mesh
    chain = lambda layouts: [mesh.layout(_fitting(x.shape, axes, mesh, source)) for axes in layouts]
    forward, backward = chain(constraint.axes), chain(constraint.gradient)
    with _tf.stop_recording():
        found = _in_turn(tf.identity(x), forward)
    _tf.record_operation("Constrain", [found], [x], lambda g: [_in_turn(g, backward)], None)
    if hasattr(x, "_keras_mask"):
        found._keras_mask = x._keras_mask
    return found


def _in_turn(x, layouts):
    for layout in layouts:
        x = dtensor.relayout(x, layout)
    return x


def _fitting(shape, axes, mesh, source):
    """`axes`, without "data" for a batch that it does not divide."""
    fitting = list(axes)
    for k, (size, axis) in enumerate(zip(shape, axes)):
        if axis is None or size is None or size % mesh.shape[axis] == 0:
            continue
        if k > 0 or axis != "data":
            raise ValueError(
                f"{source}: dim {k} of a tensor of shape {tuple(shape)} cannot be split over "
                f"{axis}={mesh.shape[axis]}, which does not divide {size}; pad it to "
                f"{-(-size // mesh.shape[axis]) * mesh.shape[axis]}, or leave it whole (None)"
            )
        fitting[k] = None
    return fitting


def _by_rule(layer, end, values):
    """The inputs or output of a layer, laid out as the rules of the strategy's LayoutMap say."""
    path = f"{layer.path}/{end}"
    found = tf.distribute.get_strategy().layouts.of_activation(path)
    if found is None:
        return values
    pattern, constraint = found
    source = f"rule {pattern!r}: {constraint}"
    fits = lambda x: tf.is_tensor(x) and x.dtype.is_floating and x.shape.rank == constraint.rank
    if not any(map(fits, tf.nest.flatten(values))):
        shapes = [tuple(x.shape) for x in tf.nest.flatten(values) if tf.is_tensor(x)]
        raise ValueError(f"{source} is for {constraint.rank} dims; {path!r} has shapes {shapes}")
    return tf.nest.map_structure(
        lambda x: _constrain(x, constraint, source) if fits(x) else x, values
    )


def install():
    """Applies the rules for inputs and outputs in the steps of a MeshStrategy, once a process."""
    stock, stock_matmul = keras.layers.Layer.__call__, _tf.numpy.matmul

    @functools.wraps(stock)
    def call(self, *args, **kwargs):
        if not in_step():
            return stock(self, *args, **kwargs)
        args, kwargs = _by_rule(self, "input", (args, kwargs))
        output = stock(self, *args, **kwargs)
        constraint = getattr(self, "constraint_of_output", None)  # of what `constrain` made
        if constraint is not None:
            return _constrain(output, constraint, "constrain")
        return _by_rule(self, "output", output)

    @functools.wraps(stock_matmul)
    def matmul(x1, x2):
        if not in_step() or len(x1.shape) < 3 or len(x2.shape) != 2:
            return stock_matmul(x1, x2)
        if not tf.distribute.get_strategy().layouts.of_activations:
            return stock_matmul(x1, x2)
        # Keras merges all dims of x1 but the last. Behind that, DTensor cannot leave each device its
        # shard of a sum along a dim such as the sequence: it would sum whole tensors.
        return tf.matmul(x1, tf.reshape(x2, [1] * (len(x1.shape) - 2) + list(x2.shape)))

    keras.layers.Layer.__call__ = call
    _tf.numpy.matmul = matmul
