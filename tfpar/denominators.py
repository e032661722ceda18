"""What normalised the losses of a training step: rows, tokens or the sum of sample weights.

The mean of a window of micro-batches is that of one big batch only if every micro-batch weighs by
what its own loss was divided by. An optimizer never sees that: it receives finished gradients. So
while a Keras train step runs, `Notes` writes down what each Keras loss divided by.
"""

import contextlib
import functools
import threading

import keras
import tensorflow as tf

from tfpar import _tf

_here = threading.local()

# How a loss made one number of many: a mean over `count` items, or their sum.
MEAN, SUM = "mean", "sum"


class Loss:
    """One loss of a step.

    Attributes:
      value: the scalar loss of the micro-batch.
      kind: MEAN or SUM.
      count: what it was divided by, a scalar tensor; None if that is the number of rows.
      whole: where every replica has its own part of the rows, what all replicas divide by, a scalar
        tensor; else None.
    """

    def __init__(self, value, kind, count):
        self.value = value
        self.kind = kind
        self.count = count
        self.whole = None


class Notes:
    """What is known of the losses of the step that runs or is traced.

    Attributes:
      rows: the number of rows of the micro-batch, an int or a scalar tensor.
      last: whether the micro-batch is the last slice of the batch that `fit` was given.
      losses: list of `Loss`, in the order of their computation.
      totals: {id of an optimizer: (the loss it minimises, that loss scaled)}.
    """

    def __init__(self, rows, last=True):
        self.rows = rows
        self.last = last
        self.losses = []
        self.totals = {}


@contextlib.contextmanager
def take_notes(rows, last=True):
    """Writes down the losses computed inside; yields the `Notes`."""
    _install()
    outer = notes()
    _here.notes = Notes(rows, last)
    try:
        yield _here.notes
    finally:
        _here.notes = outer


def notes():
    """The `Notes` of the step that runs in this thread, or None outside one."""
    return getattr(_here, "notes", None)


@contextlib.contextmanager
def over_replicas(total):
    """Normalises Keras' losses computed inside over the rows, tokens or weights of all replicas.

    Keras itself would divide them by the number of replicas.

    Args:
      total: a function that sums a scalar over the replicas, for each of them; None to leave losses
        as they are, those of a replica's own rows.
    """
    _install()
    outer = getattr(_here, "total", None), keras_divides()
    _here.total, _here.keras_divides = total, False
    try:
        yield
    finally:
        _here.total, _here.keras_divides = outer


def keras_divides():
    """Whether Keras divides losses by the number of replicas, outside of `over_replicas`."""
    return getattr(_here, "keras_divides", True)


def summed_over_replicas():
    """The function that sums a scalar over the replicas, if `over_replicas` was given one."""
    return getattr(_here, "total", None)


def share(count):
    """What a mean over `count` items of a replica contributes to the mean over those of all.

    Returns:
      (the factor, the items of all replicas).
    """
    count = tf.cast(count, wide())
    whole = _here.total(count)
    return tf.math.divide_no_nan(count, whole), whole


def weigh(loss, count):
    """Says what a loss of your own was divided by, for exact gradient accumulation.

    Stock Keras losses need no such word. In a `compute_loss` or `train_step` of your own::

        mask = tf.cast(y > 0, "float32")
        tokens = tf.reduce_sum(mask)
        return tfpar.weigh(tf.reduce_sum(per_token * mask) / tokens, tokens)

    Args:
      loss: a scalar tensor, a mean over `count` items.
      count: number or scalar tensor: rows, tokens, sum of weights.

    Returns:
      `loss`, unchanged. Without an `AccumulatingOptimizer` nothing else happens.
    """
    here = notes()
    if here is not None:
        loss = tf.identity(loss)  # a tensor of its own, to be found again in the graph
        here.losses.append(Loss(loss, MEAN, count))
    return loss


def wide():
    """The dtype in which denominators and windows add up: float64 where Keras' default is, else float32."""
    return "float64" if keras.config.floatx() == "float64" else "float32"


def rows_of(batch):
    """The number of rows of a nest of tensors: an int if it is known, else a scalar tensor."""
    for value in tf.nest.flatten(batch):
        if tf.is_tensor(value) and value.shape.rank:
            return value.shape[0] if value.shape[0] is not None else tf.shape(value)[0]
    return 1


@functools.cache
def _install():
    """Has Keras' reduction of losses write into the notes, where there are some."""
    stock = _tf.losses.reduce_weighted_values

    @functools.wraps(stock)
    def reduce_weighted_values(
        values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None
    ):
        loss = stock(values, sample_weight, mask, reduction, dtype)
        here, total = notes(), summed_over_replicas()
        values = tf.convert_to_tensor(values)
        if not (here or total) or reduction in (None, "none") or not values.shape.rank:
            return loss
        noted = _loss(loss, values, sample_weight, mask, reduction)
        if total and noted.kind == MEAN:
            factor, noted.whole = share(rows_of(values) if noted.count is None else noted.count)
            loss = noted.value = loss * tf.cast(factor, loss.dtype)
        if here:
            here.losses.append(noted)
        return loss

    stock_unscale = _tf.losses.unscale_loss_for_distribution

    @functools.wraps(stock_unscale)
    def unscale_loss_for_distribution(value):
        """The loss to report: inside `over_replicas`, that of all replicas."""
        if keras_divides():
            return stock_unscale(value)
        total = summed_over_replicas()
        return total(tf.convert_to_tensor(value)) if total else value

    stock_scale = _tf.losses.scale_loss_for_distribution

    @functools.wraps(stock_scale)
    def scale_loss_for_distribution(value):
        return stock_scale(value) if keras_divides() else value

    _tf.losses.scale_loss_for_distribution = scale_loss_for_distribution
    _tf.losses.reduce_weighted_values = reduce_weighted_values
    _tf.losses.unscale_loss_for_distribution = unscale_loss_for_distribution


def _loss(loss, values, sample_weight, mask, reduction):
    """The `Loss` that Keras just computed (the formulas of its `reduce_weighted_values`)."""
    if reduction == "sum":
        return Loss(loss, SUM, None)
    dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
    if reduction == "mean_with_sample_weight" and not (mask is None and sample_weight is None):
        weights = _tf.losses.apply_mask(
            None if sample_weight is None else tf.cast(sample_weight, dtype), mask, dtype, reduction
        )
        return Loss(loss, MEAN, tf.reduce_sum(tf.cast(weights, dtype)))
    if mask is not None:
        valid = tf.reduce_sum(tf.cast(mask, dtype))
        per_item = tf.math.divide_no_nan(_size(values, dtype), _size(mask, dtype))  # without rows 0
        return Loss(loss, MEAN, valid * per_item)
    if values.shape.rank == 1:
        return Loss(loss, MEAN, None)
    return Loss(loss, MEAN, _size(values, dtype))


def _size(tensor, dtype):
    known = tensor.shape.num_elements()
    return tf.constant(known, dtype) if known is not None else tf.cast(tf.size(tensor), dtype)
