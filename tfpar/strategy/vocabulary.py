"""A vocabulary split over `model`: lookups, logits and losses without gathering it.

DTensor gathers a table before it looks rows up, and logits before it finds the largest. In a step
Keras' own functions for both give way to the ones below. Where `model` does not divide the
vocabulary, the logits behind its end are set so low that no softmax sees them, and what a model
returns has none of them.
"""

import functools

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf
from tfpar.strategy.data import batch_axes, lay_out_rows
from tfpar.variables import ShardedVariable, in_step, padded_scope, shard_counts

NO_LOGIT = -1e9  # exp of it is 0 in every dtype


def _mesh():
    return tf.distribute.get_strategy().step_mesh


def lookup(table, ids, mesh):
    """In a step: rows of a table that is split by its rows over `model`.

    Each device looks up the ids whose rows it holds and takes zeros for the others; one all-reduce
    of the rows adds them up (Megatron-LM, section 3). The gradient is sparse, as that of a gather.
    Ids that the table does not have give NaN: no device can raise an error for all.

    Args:
      table: a `ShardedVariable` of shape (rows, width).
      ids: ints of any shape, negative ones counted from the end.
      mesh: the `Mesh`.

    Returns:
      A tensor of shape (*ids.shape, width) in the table's dtype.
    """
    count, width = table.shape
    ids = tf.where(ids < 0, ids + count, ids)
    batch = batch_axes(ids, mesh)
    with _tf.stop_recording():
        value = table.padded_value()
        held = value.shape[0] // mesh.model
        # A dim of its own for the shards: each device has its part, looked up along the next dim.
        parts = tf.reshape(value, [mesh.model, held, width])
        parts = dtensor.relayout(parts, mesh.layout(("model", None, None)))
        starts = tf.reshape(tf.range(mesh.model, dtype=ids.dtype) * held, [-1] + [1] * len(batch))
        starts = dtensor.relayout(starts, mesh.layout(["model", *[None] * len(batch)]))
        places = tf.expand_dims(ids, 0) - starts
        here = tf.logical_and(places >= 0, places < held)
        rows = tf.gather(parts, tf.where(here, places, 0), axis=1, batch_dims=1)
        rows = tf.where(tf.expand_dims(here, -1), rows, tf.zeros((), rows.dtype))
        rows = dtensor.relayout(rows, mesh.layout(["model", *batch, None]))
        known = tf.logical_and(ids >= 0, ids < count)
        rows = lay_out_rows(tf.reduce_sum(rows, 0), mesh)
        rows = tf.where(tf.expand_dims(known, -1), rows, tf.cast(np.nan, rows.dtype))

    def backward(gradient):
        gradient = tf.reshape(gradient, [-1, width])
        shape = tf.constant(table.padded_shape)
        return [tf.IndexedSlices(gradient, tf.reshape(ids, [-1]), shape)]

    _tf.variable_accessed(table)
    _tf.record_operation("VocabularyLookup", [rows], [table.handle], backward, None)
    return rows


def split_logits(logits, size, mesh):
    """In a step: logits of `size` classes, from those of a padded vocabulary.

    Returns:
      A tensor of the first `size` logits, gathered if anyone uses it. The ones that are split stay
      with it for the losses and metrics that know how to use them.
    """
    classes = tf.range(logits.shape[-1])
    logits = tf.where(classes < size, logits, tf.cast(NO_LOGIT, logits.dtype))
    whole = lay_out_rows(logits, mesh)
    found = whole[..., :size]
    found._tfpar_split_logits = logits
    return found


def _split(logits):
    return getattr(logits, "_tfpar_split_logits", logits)


def _with_dtype(logits, dtype):
    """`logits` in another dtype, with what is attached to it."""
    if not hasattr(logits, "_tfpar_split_logits") or dtype is None:
        return logits
    found = tf.cast(logits, dtype)
    found._tfpar_split_logits = tf.cast(_split(logits), dtype)
    mask = getattr(logits, "_keras_mask", None)
    if mask is not None:
        found._keras_mask = mask
    return found


def _held(weight):
    """The `ShardedVariable` of a Keras variable; `value` would be cast under a mixed policy."""
    value = getattr(weight, "_value", None)
    return value if isinstance(value, ShardedVariable) else None


def _padded(weight):
    """Whether, in a step, a weight has padding behind a dim that a layer could read split."""
    held = _held(weight)
    return in_step() and held is not None and held.padded_shape != tuple(held.shape)


def install():
    """Puts the functions above in place of Keras' own for the time of a step, once a process."""
    layers = keras.layers
    stock_lookup, stock_reversible = layers.Embedding.call, layers.ReversibleEmbedding.call
    stock_dense, stock_loss = layers.Dense.call, keras.losses.Loss.__call__
    stock_argmax = _tf.numpy.argmax
    stock_cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits

    @functools.wraps(stock_lookup)
    def embedding(self, inputs, *args, **kwargs):
        table = _held(self._embeddings)
        if not in_step() or table is None:
            return stock_lookup(self, inputs, *args, **kwargs)
        rows_split = table.padded_read_layout.sharding_specs[0] == "model"
        plain = not self.lora_enabled and self.quantization_mode is None
        if rows_split and plain:
            ids = tf.cast(inputs, tf.int32)
            return tf.cast(lookup(table, ids, _mesh()), self.compute_dtype)
        rows = stock_lookup(self, inputs, *args, **kwargs)
        split = shard_counts(table.read_layout)[-1] > 1
        # Left split, the layout of their width spreads through the model, and where it meets that of
        # split weights DTensor fails.
        return lay_out_rows(rows, _mesh()) if split else rows

    @functools.wraps(stock_reversible)
    def reversible(self, inputs, reverse=False):
        weight = self._embeddings if self.tie_weights else self.reverse_embeddings
        if not reverse or not _padded(weight):
            return stock_reversible(self, inputs, reverse)
        with padded_scope():
            logits = stock_reversible(self, inputs, reverse)
        return split_logits(logits, self.input_dim, _mesh())

    @functools.wraps(stock_dense)
    def dense(self, inputs, *args, **kwargs):
        linear = self.activation is None or self.activation is keras.activations.linear
        weights = [self._kernel, self.bias] if self.use_bias else [self._kernel]
        if not linear or not all(map(_padded, weights)) or _padded_rows(_held(self._kernel)):
            return stock_dense(self, inputs, *args, **kwargs)
        with padded_scope():
            logits = stock_dense(self, inputs, *args, **kwargs)
        return split_logits(logits, self.units, _mesh())

    @functools.wraps(stock_loss)
    def loss(self, y_true, y_pred, sample_weight=None):
        y_pred = keras.tree.map_structure(lambda x: _with_dtype(x, self.dtype), y_pred)
        return stock_loss(self, y_true, y_pred, sample_weight)

    @functools.wraps(stock_argmax)
    def argmax(x, axis=None, keepdims=False):
        x = tf.convert_to_tensor(x)
        last = axis is not None and axis % max(x.shape.rank, 1) == x.shape.rank - 1
        if not in_step() or not last or not x.dtype.is_floating or _mesh().model == 1:
            return stock_argmax(x, axis, keepdims)
        # The first place of the largest: a reduction that DTensor makes of split values, too.
        x = tf.cast(_split(x), keras.backend.result_type(x.dtype.name, "float32"))
        # As in Keras' own, -0 is less than 0.
        negative = tf.logical_and(tf.equal(x, 0), tf.math.reciprocal(x) < 0)
        x = tf.where(negative, -np.finfo(x.dtype.as_numpy_dtype).tiny, x)
        largest = tf.reduce_max(x, -1, keepdims=True)
        places = tf.where(tf.equal(x, largest), tf.range(x.shape[-1]), x.shape[-1])
        return tf.minimum(tf.reduce_min(places, -1, keepdims=keepdims), x.shape[-1] - 1)

    @functools.wraps(stock_cross_entropy)
    def cross_entropy(labels, logits, name=None):
        logits = _split(tf.convert_to_tensor(logits))
        if not in_step() or logits.dtype == tf.float32:
            return stock_cross_entropy(labels, logits, name)
        # DTensor's rule for split classes writes its ones as float32, whatever the type.
        labels = tf.convert_to_tensor(labels)
        classes = tf.range(logits.shape[-1], dtype=labels.dtype)
        wanted = tf.cast(tf.equal(labels[..., None], classes), logits.dtype)
        return tf.nn.softmax_cross_entropy_with_logits(wanted, logits, name=name)

    layers.Embedding.call = embedding
    layers.ReversibleEmbedding.call = reversible
    layers.Dense.call = dense
    keras.losses.Loss.__call__ = loss
    _tf.numpy.argmax = argmax
    tf.nn.sparse_softmax_cross_entropy_with_logits = cross_entropy


def _padded_rows(kernel):
    return kernel.padded_shape[0] != kernel.shape[0]
