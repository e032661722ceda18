"""Batches on their way to a mesh: each device receives its own slice, one batch ahead."""

import warnings

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar.variables import to_mesh

_WAYS_OUT = {
    tf.RaggedTensor: "make it dense in the dataset, for example with x.to_tensor()",
    tf.SparseTensor: "make it dense in the dataset, for example with tf.sparse.to_dense(x)",
}


def pack(batch, mesh):
    """Packs a nest of host values into DTensors on `mesh`.

    Dim 0 of every tensor is sharded over `data`. A batch that `data` does not divide is
    replicated over it instead: every device computes all its rows, which is exact.

    Args:
      batch: a nest of arrays, tensors, numbers or None. DTensors pass through.
      mesh: a `Mesh` with pipe=1.

    Raises:
      ValueError: a ragged, sparse or string tensor.
    """
    flat = [_to_tensor(value) for value in tf.nest.flatten(batch, expand_composites=False)]
    plain = [t for t in flat if tf.is_tensor(t) and not dtensor.is_dtensor(t)]
    rows = {t.shape[0] for t in plain if t.shape.rank}
    even = all(n % mesh.data == 0 for n in rows)
    if not even:
        _warn_uneven(rows, mesh)
    packed = []
    for value in flat:
        if tf.is_tensor(value) and not dtensor.is_dtensor(value):
            axes = (None,) * value.shape.rank
            if even and axes:
                axes = ("data", *axes[1:])
            value = to_mesh(value, mesh.layout(axes))
        packed.append(value)
    return tf.nest.pack_sequence_as(batch, packed)


def cut(batch, parts, multiple=1):
    """Cuts a nest of host values along its rows into at most `parts` nests of nearly equal rows.

    Args:
      batch: a nest of arrays, tensors, numbers or None.
      parts: how many, at most.
      multiple: what the rows of all but the last are a multiple of.
    """
    flat = tf.nest.flatten(batch, expand_composites=False)
    rows = next(len(value) for value in flat if np.ndim(value))
    size = -(-rows // (parts * multiple)) * multiple
    take = lambda start: lambda v: v[start : start + size] if np.ndim(v) else v
    return [tf.nest.map_structure(take(start), batch) for start in range(0, rows, size)]


def batch_axes(tensor, mesh):
    """The axes of a tensor whose dim 0 is a batch, if that divides."""
    axes: list = [None] * tensor.shape.rank
    if axes and tensor.shape[0] is not None and tensor.shape[0] % mesh.data == 0:
        axes[0] = "data"
    return axes


def lay_out_rows(tensor, mesh):
    """In a step: lays a tensor out by its rows over `data` if they divide, else whole."""
    return dtensor.relayout(tensor, mesh.layout(batch_axes(tensor, mesh)))


def to_tensors(batch):
    """A nest of host values as tensors that can live on a mesh.

    Raises:
      ValueError: a ragged, sparse or string tensor.
    """
    return tf.nest.map_structure(_to_tensor, batch, expand_composites=False)


def _to_tensor(value):
    if isinstance(value, tf.experimental.Optional):
        return None  # how a dataset carries None
    for kind, way_out in _WAYS_OUT.items():
        if isinstance(value, kind):
            raise ValueError(
                f"a batch holds a {kind.__name__} of shape {tuple(value.shape)}, which a mesh "
                f"cannot split; {way_out}"
            )
    if value is None or isinstance(value, (str, bool)) or callable(value):
        return value  # arguments of strategy.run that are no data
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype == tf.string:
        raise ValueError(
            f"a batch holds a string tensor of shape {tuple(tensor.shape)}, which cannot live on "
            "a mesh; turn strings into numbers in the dataset, for example with "
            "dataset.map(text_vectorization)"
        )
    return tensor


_warned: set[int] = set()


def _warn_uneven(rows, mesh):
    if mesh.data not in _warned:
        _warned.add(mesh.data)
        warnings.warn(
            f"a batch with {sorted(rows)} rows does not divide over data={mesh.data}: it is "
            "computed replicated over `data` (exact, but not faster than one device). Choose a "
            "batch size that `data` divides to split every batch",
            stacklevel=2,
        )


class PackedDataset:
    """A `tf.data.Dataset` whose batches come out packed on a mesh (see `pack`).

    Args:
      dataset: a `tf.data.Dataset` of batches.
      mesh: the `Mesh` to pack on; None to leave batches as they are.
    """

    def __init__(self, dataset, mesh):
        self._dataset = dataset
        self._mesh = mesh

    @property
    def element_spec(self):
        return self._dataset.element_spec

    def example(self):
        """A nest shaped like a batch, to build a model from: specs if they tell all ranks.

        Building from specs takes no batch from the dataset: a shuffle or a generator goes on as
        it would on one device.
        """
        specs = tf.nest.flatten(self.element_spec)
        if all(getattr(s, "shape", None) is None or s.shape.rank is not None for s in specs):
            return tf.nest.map_structure(
                lambda s: None if isinstance(s, tf.OptionalSpec) else s, self.element_spec
            )
        return next(iter(self._dataset))

    def __iter__(self):
        return PackedIterator(iter(self._dataset), self._mesh)


class PackedIterator:
    """Yields packed batches. `prepare()` packs the next one while a step runs."""

    def __init__(self, iterator, mesh):
        self._iterator = iterator
        self._mesh = mesh
        self._ready = []

    def __iter__(self):
        return self

    def __next__(self):
        self.prepare()
        batch, error = self._ready.pop()
        if error is not None:
            raise error
        return batch

    def prepare(self):
        """Packs the next batch now; its error, or the end of the data, waits for its turn."""
        if not self._ready:
            try:
                batch = next(self._iterator)
                self._ready.append((pack(batch, self._mesh) if self._mesh else batch, None))
            except Exception as error:
                self._ready.append((None, error))
