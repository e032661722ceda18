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
def _marked(name, mark=True):
    outer = getattr(_here, name, False)
    setattr(_here, name, mark)
    try:
        yield
    finally:
        setattr(_here, name, outer)


def step_scope():
    """Marks the code of a step: in here variables are DTensors (see the module's docstring)."""
    return _marked("in_step")


def in_step():
    """Whether the calling code runs (or is being traced) as part of a step on a mesh."""
    return getattr(_here, "in_step", False)


def update_scope():
    """Marks code of a step that updates variables: in here each reads as its slots are stored."""
    return _marked("updating")


def padded_scope():
    """Marks code of a step in which variables read with the padding of split dims."""
    return _marked("padded")


def _on(name):
    return getattr(_here, name, False)


def on_stage(stage):
    """Marks code that builds or runs pipeline stage `stage`: it uses the mesh of that stage."""
    return _marked("stage", stage)


def current_stage():
    """The pipeline stage that the calling code runs for, or None."""
    stage = getattr(_here, "stage", False)
    return None if stage is False else stage


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


def padded_shape(shape, layout):
    """`shape` with each dim rounded up to a multiple of its number of shards."""
    return tuple(-(-size // n) * n for size, n in zip(shape, shard_counts(layout)))


def _fit(value, shape):
    """`value` with zeros added to, or cut from, the end of each dim to have `shape`.

    Sparse gradients are made to fit such a dense shape.
    """
    if isinstance(value, tf.IndexedSlices):
        rows = _fit(value.values, (value.values.shape[0], *shape[1:]))
        return tf.IndexedSlices(rows, value.indices, tf.constant(shape))
    if any(have > want for have, want in zip(value.shape, shape)):
        value = value[tuple(slice(size) for size in shape)]
    missing = [want - have for have, want in zip(value.shape, shape)]
    return tf.pad(value, [(0, n) for n in missing]) if any(missing) else value


def _laid_out(value, layout, shape):
    """In a step: `value` in `layout`, with zeros added or cut off to have `shape`.

    DTensor's rules for pads and slices take the layout of one side for that of the other: the dims
    that change are whole on both.
    """
    if tuple(value.shape) != shape:
        kept = zip(layout.sharding_specs, value.shape, shape)
        whole = [spec if have == want else dtensor.UNSHARDED for spec, have, want in kept]
        whole = dtensor.Layout(whole, layout.mesh)
        value = dtensor.relayout(_fit(dtensor.relayout(value, whole), shape), whole)
    return dtensor.relayout(value, layout)


def _replicated(gradient, mesh):
    """In a step: a sparse gradient whose rows are whole on every device."""
    one = lambda x: dtensor.relayout(x, dtensor.Layout.replicated(mesh, x.shape.rank))
    return tf.IndexedSlices(one(gradient.values), one(gradient.indices), gradient.dense_shape)


class ShardedVariable(dtensor.DVariable):
    """A variable whose value lives on a mesh in a layout.

    Where an axis does not divide a dim, zeros are stored behind it. `shape`, the values outside a
    step and those that a model reads in a step are without; its gradient has them where the model
    could read the dim split. In an `update_scope` a variable reads as its optimizer slots are stored,
    so that an update needs no communication but that of its result.

    Args:
      initial_value: the whole value: an array, a tensor, or a function that makes one.
      layout: the `dtensor.Layout` to hold it in.
      path: the name that error messages use, such as "dense/kernel".
      owned_by: the class of the layer, optimizer or metric whose variable it is.
      read_layout: the layout in which a model reads it in a step, if another one: stored split,
        gathered for each use.
      slot_layout: the layout of its optimizer slots, if another one.
      gradient_layout: the layout that its gradient is reduced to, if it divides the dims.
      updated_whole: whether an update sees it whole, for optimizers that need it so.
      pad: whether a dim that its axis does not divide is padded; else it is an error.
      **kwargs: as `tf.Variable`.

    Attributes:
      stage: the pipeline stage on whose mesh it lives.
      original: the variable whose copy it is, or itself.
      copies: {stage: `ShardedVariable`}: its copies for the other stages that use it. What is assigned
        outside a step they are assigned too; in a step a stage changes its own alone.
      copies_add: whether its value is the sum over all copies, which are 0 outside a step.
    """

    def __init__(
        self,
        initial_value,
        *,
        layout,
        path,
        owned_by=object,
        read_layout=None,
        slot_layout=None,
        gradient_layout=None,
        updated_whole=False,
        pad=False,
        **kwargs,
    ):
        self._path = path
        self.owned_by = owned_by
        if callable(initial_value):
            initial_value = initial_value()
        dtype = kwargs.get("dtype")
        with tf.device("CPU:0"):
            initial_value = tf.convert_to_tensor(initial_value, dtype=dtype)
            shape = tuple(initial_value.shape)
            self._stored_shape = padded_shape(shape, layout) if pad else shape
            try:
                packed = to_mesh(_fit(initial_value, self._stored_shape), layout)
            except ValueError as error:
                raise ValueError(f"variable {path!r}: {error}") from None
        self._padded_read_layout = read_layout or layout
        self._padded_shape = padded_shape(shape, self._padded_read_layout) if pad else shape
        kept = zip(self._padded_read_layout.sharding_specs, shape, self._padded_shape)
        specs = [spec if n == padded else dtensor.UNSHARDED for spec, n, padded in kept]
        self._read_layout = dtensor.Layout(specs, layout.mesh)
        self._slot_layout = self._update_layout = slot_layout or layout
        self._slot_shape = self._update_shape = padded_shape(self._stored_shape, self._slot_layout)
        self._gradient_layout = gradient_layout
        self._is_updated_whole = False
        super().__init__(packed, **kwargs)
        self.stage = 0
        self.original = self
        self.copies = {}
        self.copies_add = False
        self._shape = tf.TensorShape(shape)
        if updated_whole:
            self.update_whole()

    @property
    def path(self):
        """The Keras path of the variable, such as "dense/kernel"."""
        return self._path

    @property
    def is_copied(self):
        """Whether there are several of it, on other stages."""
        return self.original is not self or bool(self.copies)

    def copy_to(self, other):
        """Outside a step: gives its value to its copy `other`, on another mesh of the same shape."""
        packed = dtensor.pack(self.shards(), other.layout)
        tf.raw_ops.AssignVariableOp(resource=other.handle, value=packed)

    @property
    def read_layout(self):
        """The `dtensor.Layout` in which a model reads it in a step."""
        return self._read_layout

    @property
    def padded_read_layout(self):
        """The `dtensor.Layout` of `padded_value`: `read_layout`, with padded dims split."""
        return self._padded_read_layout

    @property
    def slot_layout(self):
        """The `dtensor.Layout` of its optimizer slots."""
        return self._slot_layout

    @property
    def slots_are_padded(self):
        """Whether zeros are stored behind some dim of its slots."""
        return self._slot_shape != tuple(self.shape)

    def update_whole(self):
        """From now on an update sees it whole, whatever it is stored as."""
        self._is_updated_whole = True
        self._update_layout = dtensor.Layout.replicated(self.layout.mesh, self.layout.rank)
        self._update_shape = tuple(self.shape)

    @property
    def is_updated_whole(self):
        """Whether `update_whole` was called."""
        return self._is_updated_whole

    @property
    def padded_shape(self):
        """The shape of `padded_value` and of its gradient in a step (a tuple of ints)."""
        return self._padded_shape

    @property
    def stored_shape(self):
        """The global shape of what is stored, padding included (a tuple of ints)."""
        return self._stored_shape

    @property
    def is_padded(self):
        """Whether zeros are stored behind some dim."""
        return self._stored_shape != tuple(self.shape)

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
        backward = lambda grad: [grad]
        if in_step():
            updating = _on("updating")
            if self._updates_as_stored if updating else self._reads_as_stored:
                return super()._read_variable_op(no_copy)
            with _tf.stop_recording():
                value = super()._read_variable_op(no_copy)
                if updating:
                    return _laid_out(value, self._update_layout, self._update_shape)
                if _on("padded"):
                    value = _laid_out(value, self._padded_read_layout, self._padded_shape)
                else:
                    value = _laid_out(value, self._read_layout, tuple(self.shape))
            backward = self._lay_out_gradient
        elif tf.executing_eagerly():
            with _tf.stop_recording():
                value = self._whole(super()._read_variable_op(no_copy))
        else:
            value = self._read_when_called()
        _tf.variable_accessed(self)
        _tf.record_operation(
            "ReadVariableOp",
            [value],
            [self.handle],
            backward_function=backward,
            forward_function=lambda tangent: [tangent],
        )
        return value

    @property
    def _reads_as_stored(self):
        same = self._read_layout == self.layout and not self.is_padded
        return same and self._gradient_layout is None

    def padded_value(self):
        """In a step: its value as a model reads it, with the padding of split dims."""
        value = super()._read_variable_op()
        return _laid_out(value, self._padded_read_layout, self._padded_shape)

    @property
    def _updates_as_stored(self):
        return self._update_layout == self.layout and self._update_shape == self._stored_shape

    def _lay_out_gradient(self, gradient):
        if isinstance(gradient, tf.IndexedSlices):
            return [_fit(gradient, self._padded_shape)]
        # DTensor lets the layouts of consumers spread to their producers, some of which cannot have
        # them: the gradient is first laid out as the value was.
        as_read = tuple(gradient.shape) == tuple(self.shape)
        gradient = dtensor.relayout(
            gradient, self._read_layout if as_read else self._padded_read_layout
        )
        layout = self._gradient_layout
        if layout is None or padded_shape(self._padded_shape, layout) != self._padded_shape:
            layout = self._padded_read_layout  # where slots are padded the update lays it out
        return [_laid_out(gradient, layout, self._padded_shape)]

    def as_update(self, gradient):
        """In a step: a dense or sparse gradient of this variable in the shape of its slots."""
        if isinstance(gradient, tf.IndexedSlices):
            if self._is_updated_whole:
                gradient = _replicated(gradient, self.layout.mesh)
            return _fit(gradient, self._update_shape)
        if self._updates_as_stored and tuple(gradient.shape) == self._update_shape:
            return gradient
        return _laid_out(gradient, self._update_layout, self._update_shape)

    def _whole(self, value):
        """A stored value, a DTensor, as a plain tensor without padding."""
        value = to_host(value)
        if self.is_padded:
            with tf.device("CPU:0"):
                value = _fit(value, tuple(self.shape))
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
        return self._whole(super()._read_variable_op())

    # Writing.
    def _write(self, op, value):
        """In a step: runs a raw op that takes a value, in whose shape the padding may be missing."""
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        shape = tuple(value.shape)
        most = [max(sizes) for sizes in zip(self._stored_shape, self._update_shape)]
        bounds = list(zip(self.shape, shape, most))
        if len(shape) != len(most) or not all(low <= n <= high for low, n, high in bounds):
            raise ValueError(
                f"variable {self.path!r} has shape {tuple(self.shape)}; received a value of shape "
                f"{shape}"
            )
        if _on("updating") and shape == self._update_shape:
            value = dtensor.relayout(value, self._update_layout)
        op(resource=self.handle, value=_laid_out(value, self.layout, self._stored_shape))
        return self

    def assign(self, value, use_locking=None, name=None, read_value=True):
        if in_step() and not self._is_plain(value):
            if not self._is_plainly_stored:
                return self._write(tf.raw_ops.AssignVariableOp, value)
            return super().assign(value, use_locking, name, read_value)
        self._refuse_graph("assign")
        with tf.device("CPU:0"):
            value = tf.cast(tf.convert_to_tensor(to_host(value)), self.dtype)
            if value.shape != self.shape:
                raise ValueError(
                    f"variable {self.path!r} has shape {tuple(self.shape)}; received a value of "
                    f"shape {tuple(value.shape)}"
                )
            packed = to_mesh(_fit(value, self._stored_shape), self.layout)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=packed)
        for copy in self.copies.values():
            copy.assign(tf.zeros_like(value) if self.copies_add else value)
        return self if read_value else None

    def assign_add(self, delta, use_locking=None, name=None, read_value=True):
        if in_step() and not self._is_plain(delta):
            if not self._is_plainly_stored:
                return self._write(tf.raw_ops.AssignAddVariableOp, delta)
            return super().assign_add(delta, use_locking, name, read_value)
        self._refuse_graph("assign_add")
        return self.assign(self._host_value() + tf.cast(to_host(delta), self.dtype))

    def assign_sub(self, delta, use_locking=None, name=None, read_value=True):
        if in_step() and not self._is_plain(delta):
            if not self._is_plainly_stored:
                return self._write(tf.raw_ops.AssignSubVariableOp, delta)
            return super().assign_sub(delta, use_locking, name, read_value)
        self._refuse_graph("assign_sub")
        return self.assign(self._host_value() - tf.cast(to_host(delta), self.dtype))

    @property
    def _is_plainly_stored(self):
        """Whether it reads in an update, and in a layer, as it is stored."""
        return self._updates_as_stored and not self.is_padded

    @staticmethod
    def _is_plain(value):
        """In an eager step, whether `value` is an ordinary tensor or array."""
        if not tf.executing_eagerly():
            return False
        return not (tf.is_tensor(value) and dtensor.is_dtensor(value))

    # Sparse updates: DTensor has rules for the dense ones. Equal rows add up in both.
    def _dense(self, slices):
        rows = self._update_shape[0] if in_step() and _on("updating") else self.shape[0]
        return tf.math.unsorted_segment_sum(slices.values, slices.indices, rows)

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
