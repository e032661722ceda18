"""Sharded variables, and tensors on their way between the host and a mesh.

A `ShardedVariable` has two faces. Inside a step (`strategy.run`) it is a DTensor: every device
holds and reads its own shard, and DTensor inserts the collectives. Outside a step it looks like an
ordinary `tf.Variable`: reading it gives the whole value as a plain tensor, assigning it takes a
whole plain value, and gradient tapes see plain gradients. So Keras' savers, callbacks and
`get_weights`, and code that a user writes around training, need not know that it is split.
"""

import contextlib
import functools
import threading

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf

_here = threading.local()


@contextlib.contextmanager
def step_scope():
    """Marks the code of a step: in here variables are DTensors (see the module's docstring)."""
    outer = in_step()
    _here.in_step = True
    try:
        yield
    finally:
        _here.in_step = outer


def in_step():
    """Whether the calling code runs (or is being traced) as part of a step on a mesh."""
    return getattr(_here, "in_step", False)


def shard_counts(layout):
    """How many shards each dim of a `dtensor.Layout` is cut into (a tuple of ints)."""
    return tuple(
        1 if spec == dtensor.UNSHARDED else layout.mesh.dim_size(spec)
        for spec in layout.sharding_specs
    )


@functools.lru_cache(maxsize=1024)
def _places(layout):
    """For each device of `layout.mesh`, in its order, which shard of each dim it holds."""
    names = layout.mesh.dim_names
    sizes = [layout.mesh.dim_size(name) for name in names]
    places = []
    for where in np.ndindex(*sizes):
        at = dict(zip(names, where))
        places.append(tuple(at.get(spec, 0) for spec in layout.sharding_specs))
    return places


def slices(layout, shape):
    """For each device of `layout.mesh`, in its order, the index of its shard in the whole array.

    Args:
      layout: a `dtensor.Layout` of rank n.
      shape: the global shape, n ints; each sharded dim is a multiple of its axis.

    Returns:
      A list of tuples of n `slice` objects, one per device of the mesh.
    """
    steps = [size // count for size, count in zip(shape, shard_counts(layout))]
    return [
        tuple(slice(k * step, (k + 1) * step) for k, step in zip(place, steps))
        for place in _places(layout)
    ]


def to_mesh(value, layout):
    """Packs a whole host value into a DTensor; each device receives its own shard only.

    Args:
      value: anything `tf.convert_to_tensor` takes, of the layout's rank.
      layout: a `dtensor.Layout`.
    """
    tensor = tf.convert_to_tensor(value)
    parts = np.empty((1,) * tensor.shape.rank, object)
    parts.fill(tensor)
    with tf.device("CPU:0"):
        for dim, count in enumerate(shard_counts(layout)):
            if count > 1:
                parts = _split(parts, dim, count, layout)
    # DTensor itself copies each part to its device.
    return dtensor.pack([parts[place] for place in _places(layout)], layout)


def _split(parts, dim, count, layout):
    """Cuts each tensor of the array `parts` into `count` along `dim`, which is 1 long in it."""
    size = next(parts.flat).shape[dim]
    if size % count:
        raise ValueError(
            f"dim {dim} of size {size} does not divide into {count} shards along axis "
            f"{layout.sharding_specs[dim]!r}"
        )
    cut = [tf.raw_ops.Split(axis=dim, value=part, num_split=count) for part in parts.flat]
    out = np.empty(parts.shape + (count,), object)
    for index, pieces in zip(np.ndindex(parts.shape), cut):
        for k, piece in enumerate(pieces):
            out[index + (k,)] = piece
    return np.moveaxis(out.squeeze(dim), -1, dim)


def to_host(tensor):
    """The whole value of an eager DTensor as a plain tensor on the host (plain ones pass)."""
    if not (tf.executing_eagerly() and tf.is_tensor(tensor) and dtensor.is_dtensor(tensor)):
        return tensor
    layout = dtensor.fetch_layout(tensor)
    parts = dtensor.unpack(tensor)
    if layout.is_fully_replicated():
        return parts[0]
    if len(parts) < layout.mesh.size:  # other processes hold the rest
        whole = dtensor.relayout(tensor, dtensor.Layout.replicated(layout.mesh, layout.rank))
        return dtensor.unpack(whole)[0]
    shape = tuple(n * k for n, k in zip(parts[0].shape, shard_counts(layout)))
    out = np.empty(shape, parts[0].dtype.as_numpy_dtype)
    for place, part in zip(slices(layout, shape), parts):
        out[place] = part.numpy()
    with tf.device("CPU:0"):
        return tf.constant(out)


class _Handle:
    """A variable's handle that is no eager tensor itself."""

    def __init__(self, handle):
        self._eager = handle

    def __getattr__(self, name):
        return getattr(self._eager, name)


class ShardedVariable(dtensor.DVariable):
    """A variable whose value lives on a mesh in a layout.

    Args:
      initial_value: the whole value: an array, a tensor, or a function that makes one.
      layout: the `dtensor.Layout` to hold it in.
      path: the name that error messages use, such as "dense/kernel".
      owned_by: the class of the layer, optimizer or metric whose variable it is.
      gather: whether a step reads it whole: stored split, gathered for each use. For ops that
        cannot take a split operand.
      **kwargs: as `tf.Variable`.
    """

    def __init__(self, initial_value, *, layout, path, owned_by=object, gather=False, **kwargs):
        self._path = path
        self.owned_by = owned_by
        self._gather = gather and not layout.is_fully_replicated()
        if callable(initial_value):
            initial_value = initial_value()
        dtype = kwargs.get("dtype")
        with tf.device("CPU:0"):
            initial_value = tf.convert_to_tensor(initial_value, dtype=dtype)
        try:
            packed = to_mesh(initial_value, layout)
        except ValueError as error:
            raise ValueError(f"variable {path!r}: {error}") from None
        super().__init__(packed, **kwargs)

    @property
    def path(self):
        """The Keras path of the variable, such as "dense/kernel"."""
        return self._path

    def shards(self):
        """The plain tensors that the devices hold, in the mesh's order."""
        return dtensor.unpack(super()._read_variable_op())

    # TensorFlow's C++ reads the variables among an eager op's inputs itself if their `_handle` is an
    # eager tensor; ours would come out as DTensors outside a step, and split where a step gathers.

    @property
    def handle(self):
        return self._dtensor_handle

    @property
    def _handle(self):
        return _Handle(self._dtensor_handle)

    @_handle.setter
    def _handle(self, handle):
        self._dtensor_handle = handle

    # Reading. Every read of a resource variable comes through here.
    def _read_variable_op(self, no_copy=False):
        if in_step():
            value = super()._read_variable_op(no_copy)
            if self._gather:
                whole = dtensor.Layout.replicated(self.layout.mesh, self.layout.rank)
                value = dtensor.relayout(value, whole)
            return value
        if tf.executing_eagerly():
            with _tf.stop_recording():
                value = to_host(super()._read_variable_op(no_copy))
        else:
            value = self._read_when_called()
        _tf.variable_accessed(self)
        _tf.record_operation(
            "ReadVariableOp",
            [value],
            [self.handle],
            backward_function=lambda grad: [grad],
            forward_function=lambda tangent: [tangent],
        )
        return value

    def _read_when_called(self):
        """In a function that the user traces: reads the whole value each time it is called."""
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, "capture_call_time_value"):
            raise ValueError(f"variable {self.path!r} cannot be read in a TensorFlow 1 graph")
        return graph.capture_call_time_value(
            self.read_value, tf.TensorSpec(self.shape, self.dtype), key=("tfpar", self._unique_id)
        )

    def numpy(self):
        return self._host_value().numpy()

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)

    def _host_value(self):
        return to_host(super()._read_variable_op())

    # Writing.
    def assign(self, value, use_locking=None, name=None, read_value=True):
        if in_step() and not self._is_plain(value):
            return super().assign(value, use_locking, name, read_value)
        self._refuse_graph("assign")
        with tf.device("CPU:0"):
            value = tf.cast(tf.convert_to_tensor(to_host(value)), self.dtype)
        if value.shape != self.shape:
            raise ValueError(
                f"variable {self.path!r} has shape {tuple(self.shape)}; received a value of shape "
                f"{tuple(value.shape)}"
            )
        packed = to_mesh(value, self.layout)
        super().assign(packed, use_locking, name, read_value=False)
        return self if read_value else None

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        if in_step() and not self._is_plain(delta):
            return super().assign_add(delta, use_locking, name, read_value)
        self._refuse_graph("assign_add")
        return self.assign(self._host_value() + tf.cast(to_host(delta), self.dtype))

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        if in_step() and not self._is_plain(delta):
            return super().assign_sub(delta, use_locking, name, read_value)
        self._refuse_graph("assign_sub")
        return self.assign(self._host_value() - tf.cast(to_host(delta), self.dtype))

    @staticmethod
    def _is_plain(value):
        """In an eager step, whether `value` is an ordinary tensor or array."""
        if not tf.executing_eagerly():
            return False
        return not (tf.is_tensor(value) and dtensor.is_dtensor(value))

    # Sparse updates: DTensor has rules for the dense ones. Equal rows add up in both.
    def _dense(self, slices):
        return tf.math.unsorted_segment_sum(slices.values, slices.indices, self.shape[0])

    def scatter_add(self, sparse_delta, use_locking=False, name=None):
        return self.assign_add(self._dense(sparse_delta), use_locking, name)

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        return self.assign_sub(self._dense(sparse_delta), use_locking, name)

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        rows, indices = sparse_delta.values, sparse_delta.indices
        value = tf.tensor_scatter_nd_update(self.read_value(), indices[:, None], rows)
        return self.assign(value, use_locking, name)

    def _refuse_graph(self, what):
        if not tf.executing_eagerly():
            raise ValueError(
                f"variable {self.path!r} lives on a mesh and cannot be changed ({what}) in a "
                "tf.function of your own: put the code into a function and call it as "
                "strategy.run(fn, args=(...)) inside the tf.function, or leave out the tf.function"
            )

    # Saving: the whole value, so that a checkpoint restores onto any mesh or none.

    def _serialize_to_tensors(self):
        return {"VARIABLE_VALUE": self.read_value()}

    def _restore_from_tensors(self, restored_tensors):
        return self.assign(restored_tensors["VARIABLE_VALUE"])
