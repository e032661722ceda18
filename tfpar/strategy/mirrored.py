"""The replica view: every device has the whole model and a part of the batch.

`tf.distribute.MirroredStrategy` with the numbers of one device: losses are normalised over the rows,
tokens or weights of the global batch, gradients are summed before they are clipped or checked,
metrics are pooled, and every replica draws random numbers of its own.
"""

import functools
import threading

import keras
import numpy as np
import tensorflow as tf

from tfpar import _tf, denominators
from tfpar.mesh import check_positive
from tfpar.strategy import cross_device, trainer
from tfpar.strategy import data as data_lib
from tfpar.strategy.mesh import MeshStrategy

_here = threading.local()  # in the thread of a replica: its number, while a step runs

_SAY_WHAT_IT_IS = (
    'say MirroredStrategy(loss_is="mean") if it is a mean over them, or loss_is="scaled" if it is '
    "divided by what the global batch holds"
)


class MirroredStrategy(tf.distribute.MirroredStrategy):
    """Trains a Keras model on copies of it, one per device, with the numbers of one device.

    It takes the place of `tf.distribute.MirroredStrategy`::

        strategy = tfpar.MirroredStrategy()
        with strategy.scope():
            model = build_model()
            model.compile("adam", "mse")
        model.fit(dataset)  # of global batches

    Args:
      devices: list of device names such as "GPU:0"; None for all GPUs, or the CPU.
      bucket_bytes: gradients travel fused in buckets of at least so many bytes.
      loss_is: what the loss of a model with a `compute_loss` or `train_step` of its own is, which sees
        the rows of one replica: "mean", a mean over them, or "scaled", divided by what the global
        batch holds, so that the sum over replicas is the loss. Layers that call `add_loss` need it too.

    Raises:
      ValueError: an unknown loss_is, bucket_bytes below 1.
    """

    def __init__(self, devices=None, bucket_bytes=25 << 20, loss_is=None):
        if loss_is not in (None, "mean", "scaled"):
            raise ValueError(f'loss_is must be "mean", "scaled" or None; received {loss_is!r}')
        check_positive(bucket_bytes=bucket_bytes)
        super(tf.distribute.MirroredStrategy, self).__init__(_Extended(self, devices=devices))
        self._bucket_bytes = bucket_bytes
        self._loss_is = loss_is
        self._wire = cross_device.Wire(
            list(self.extended.worker_devices), self.extended._communication_options
        )

    @property
    def loss_is(self):
        """What losses that are not Keras' own are: "mean", "scaled" or None."""
        return self._loss_is

    def make_function(self, model, step_function):
        """What Keras calls once for each execution, with an iterator over batches."""
        return trainer.execution(model, _Step(model, self, step_function, pooled=True), ahead=True)

    def make_predict_function(self, model):
        """What Keras calls once for each execution, with a list of batches."""
        step = _Step(model, self, model.predict_step)
        return lambda batches: trainer.joined([step(batch) for batch in batches])

    def split(self, batch):
        """Cuts a nest of host values into nearly equal rows, one part for each replica.

        Args:
          batch: a nest of arrays, tensors, numbers or None, dim 0 the rows.

        Returns:
          A list of nests of tensors, each on the device of its replica; some may have no rows.
        """
        batch = data_lib.to_tensors(batch)
        n = self.num_replicas_in_sync

        def part(replica, value):
            if not tf.is_tensor(value):
                return value
            if not value.shape.rank:
                return tf.identity(value)
            each, more = divmod(value.shape[0], n)
            start = replica * each + min(replica, more)
            return tf.identity(value[start : start + each + (replica < more)])

        return self._wire.map_with_id(
            lambda replica, _: tf.nest.map_structure(functools.partial(part, replica), batch),
            range(n),
        )

    def update(self, stock, optimizer, gradients, variables, shares):
        """In cross-replica context: an update with the gradients of all replicas.

        Args:
          stock: the optimizer's own `apply`.
          optimizer: a Keras optimizer, or a `LossScaleOptimizer` around one.
          gradients: list of values of all replicas, or None.
          variables: the Keras variables.
          shares: each replica's rows over those of all, if gradients are those of means over its
            rows; else None.
        """
        inner = _tf.innermost(optimizer)
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(variables)
        local = [self.experimental_local_results(g) for g in gradients]
        for variable, parts in zip(variables, local):
            for part in parts:
                if isinstance(part, tf.Tensor):  # a layer may hide its shape: a map over rows does
                    part.set_shape(variable.shape)
        if shares is not None:
            shares = self.experimental_local_results(shares)
            local = [
                parts if parts[0] is None else self._wire.map(_times, parts, shares)
                for parts in local
            ]
        sums = cross_device.exchange(local, self._wire, self._bucket_bytes)
        sums = [None if parts[0] is None else _tf.regroup(tuple(parts)) for parts in sums]
        with _tf.reduced_already(inner):
            args = (optimizer, sums, variables)
            trainer.update_replicas(self, inner, stock, args, variables)


def _times(gradient, share):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _times(gradient.values, share), gradient.indices, gradient.dense_shape
        )
    # Without rows a mean, and its gradient, may be 0 / 0.
    return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))


def _total(value):
    """In a replica: the sum of a scalar over all replicas."""
    return tf.distribute.get_replica_context().merge_call(_add_up, (tf.convert_to_tensor(value),))


def _add_up(strategy, value):
    with tf.device(strategy.extended.worker_devices[0]):
        return tf.add_n(strategy.experimental_local_results(value))


class _Extended(_tf.MirroredExtended):
    def _make_collective_ops_with_fallbacks(self):
        ops = super()._make_collective_ops_with_fallbacks()
        if not isinstance(ops, tf.distribute.ReductionToOneDevice):
            self._collective_keys = cross_device.KEYS
            ops = type(ops)(
                devices=self._devices,
                group_size=len(self._devices),
                options=self._communication_options,
                collective_keys=cross_device.KEYS,
            )
        return ops

    def _experimental_distribute_dataset(self, dataset, options):
        if not getattr(_here, "fit", False):
            return super()._experimental_distribute_dataset(dataset, options)
        return data_lib.PackedDataset(dataset, None)

    def _call_for_each_replica(self, fn, args, kwargs):
        if not tf.distribute.in_cross_replica_context() or getattr(_here, "inside", False):
            return super()._call_for_each_replica(fn, args, kwargs)
        # Calls made while the replicas wait for each other are part of the step.
        _here.inside = True
        try:
            return super()._call_for_each_replica(_whole_batch(fn), args, kwargs)
        finally:
            _here.inside = False


def _whole_batch(fn):
    """`fn` of a replica, whose Keras losses are normalised over the batch of all replicas."""
    if isinstance(fn, tf.types.experimental.GenericFunction):
        fn = fn.python_function

    @functools.wraps(fn)
    def run(*args, **kwargs):
        _here.added = []  # (layer, loss): the replicas share the layers' own lists
        _here.rows = denominators.rows_of((args, kwargs))
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        _here.replica = int(tf.get_static_value(replica))
        _here.own_loss = getattr(fn, "own_loss", False)
        try:
            with denominators.over_replicas(None if _here.own_loss else _total):
                return fn(*args, **kwargs)
        finally:
            _here.replica = None

    return run


class _Step:
    """A step function of a Keras model, compiled for the replicas of its strategy.

    Args:
      pooled: whether its outputs are logs, to be those of the global batch; else they are rows.
    """

    def __init__(self, model, strategy, step_function, pooled=False):
        self._model = model
        self._strategy = strategy
        self._pooled = pooled
        self._checked = False
        self._step_function = step_function
        self._functions: dict = {}

    def __call__(self, batch):
        if not self._checked:
            check_model(self._model, self._strategy)
            self._checked = True
        parts = self._strategy.split(batch)
        if self._model.run_eagerly:
            return self._run(parts)
        flat = tf.nest.flatten(parts)
        tensors = [value for value in flat if tf.is_tensor(value)]
        key = str(tf.nest.map_structure(_of_any_rows, parts[0]))  # as those of the other replicas
        if key not in self._functions:

            def run(*tensors):
                given = iter(tensors)
                filled = [next(given) if tf.is_tensor(value) else value for value in flat]
                return self._run(tf.nest.pack_sequence_as(parts, filled))

            specs = [_of_any_rows(tensor) for tensor in tensors]
            self._functions[key] = tf.function(run, autograph=False).get_concrete_function(*specs)
        return self._functions[key](*tensors)

    def _run(self, parts):
        batch = _tf.regroup(tuple(parts), always_wrap=True)

        def step(data):
            return self._step_function(data)

        own = bool(_own_loss(self._model)) and self._strategy.loss_is == "mean"
        step.own_loss = own  # type: ignore[attr-defined]
        outputs = self._strategy.run(step, args=(batch,))
        local = self._strategy.experimental_local_results
        if not self._pooled:
            return tf.nest.map_structure(lambda v: tf.concat(local(v), 0), outputs)
        logs = dict(tf.nest.map_structure(lambda v: tf.add_n(local(v)) / len(local(v)), outputs))
        logs.update({k: v for k, v in self._model.get_metrics_result().items() if k in logs})
        return logs


def _of_any_rows(value):
    """The spec of a tensor whose rows may vary; anything else as it is."""
    if not tf.is_tensor(value):
        return value
    shape = [None, *value.shape[1:]] if value.shape.rank else []
    return tf.TensorSpec(shape, value.dtype)


def check_model(model, strategy):
    """Refuses, before the first step, what the replicas would compute wrong."""
    trainer.refuse_jit(model, strategy, "XLA cannot compile a step that several devices share")
    own = _own_loss(model)
    if own and strategy.loss_is is None:
        raise ValueError(
            f"{type(model).__name__} has a {own[0]} of its own, whose loss sees the rows of one "
            f"replica: {_SAY_WHAT_IT_IS}"
        )


def _own_loss(model):
    """The methods of a model's own that make the loss of a training step."""
    names = ("compute_loss", "train_step")
    return [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]


def _added_by(loss):
    """The layer that added a loss while this replica called it; None for a regularizer of weights."""
    return next((layer for layer, added in _here.added if added is loss), None)


def _replica():
    """The number of the replica that runs a step in this thread, or None."""
    return getattr(_here, "replica", None)


def _sum_before_updates():
    """Has Keras' optimizers take the sum of all replicas' gradients before they do anything else."""

    def wrap(cls):
        stock = cls.apply

        @functools.wraps(stock)
        def apply(self, grads, trainable_variables=None):
            if _replica() is None or _tf.reduces_already(_tf.innermost(self)):
                return stock(self, grads, trainable_variables)
            grads = list(grads)
            variables = list(trainable_variables or self._trainable_variables)

            share = None
            if _here.own_loss:
                rows = tf.cast(_here.rows, denominators.wide())
                share = rows / _total(rows)

            def update(strategy, gradients, shares):
                strategy.update(stock, self, gradients, variables, shares)

            return tf.distribute.get_replica_context().merge_call(update, (grads, share))

        cls.apply = apply

    wrap(keras.optimizers.Optimizer)
    wrap(keras.optimizers.LossScaleOptimizer)


def _draw_by_replica():
    """Has Keras' seed generators give each replica seeds of its own."""
    stock_next = keras.random.SeedGenerator.next

    @functools.wraps(stock_next)
    def next(self, ordered=True):
        seed = stock_next(self, ordered)
        replica = _replica()
        if not replica:
            return seed
        return seed + tf.cast(np.array([replica * 2654435761 % 2**32, 0]), seed.dtype)

    keras.random.SeedGenerator.next = next


def _add_losses_by_replica():
    """Keeps the losses that layers add apart by replica, and normalises them over all replicas."""
    stock_add, stock_clear = keras.layers.Layer.add_loss, keras.layers.Layer._clear_losses
    stock_losses = keras.layers.Layer.losses

    @functools.wraps(stock_add)
    def add_loss(self, loss):
        if _replica() is None:
            return stock_add(self, loss)
        _here.added += [(self, tf.convert_to_tensor(one)) for one in tf.nest.flatten(loss)]

    @functools.wraps(stock_clear)
    def _clear_losses(self):
        if _replica() is None:
            return stock_clear(self)
        mine = {id(layer) for layer in self._flatten_layers()}
        _here.added = [(layer, loss) for layer, loss in _here.added if id(layer) not in mine]

    def losses(self):
        if _replica() is None:
            return stock_losses.fget(self)
        mine = {id(layer) for layer in self._flatten_layers()}
        added = [loss for layer, loss in _here.added if id(layer) in mine]
        return added + self._get_regularization_losses()

    keras.layers.Layer.add_loss = add_loss
    keras.layers.Layer._clear_losses = _clear_losses
    keras.layers.Layer.losses = property(losses, doc=stock_losses.__doc__)

    stock_aggregate = _tf.TensorFlowTrainer._aggregate_additional_loss

    @functools.wraps(stock_aggregate)
    def _aggregate_additional_loss(self, loss):
        whole = stock_aggregate(self, loss)
        if _replica() is None or _here.own_loss:
            return whole
        layer = _added_by(loss)
        if layer is None:
            return whole / tf.distribute.get_strategy().num_replicas_in_sync
        if not type(layer).__module__.startswith("keras."):
            kind = tf.distribute.get_strategy().loss_is
            if kind is None:
                raise ValueError(
                    f"layer {layer.name!r} adds a loss of its own, which sees the rows of one "
                    f"replica: {_SAY_WHAT_IT_IS}"
                )
            if kind == "scaled":
                return whole
        # The mean over a replica's rows, as regularizers of activations are.
        factor, _ = denominators.share(_here.rows)
        return tf.math.multiply_no_nan(whole, tf.cast(factor, whole.dtype))

    _tf.TensorFlowTrainer._aggregate_additional_loss = _aggregate_additional_loss


def _tell_who_asks_for_data():
    """Has Keras say that it is `fit` and its kin that distribute a dataset."""
    stock_init = _tf.TFEpochIterator.__init__

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        _here.fit = True  # it takes batches as they are, a loop of one's own those of the replicas
        try:
            stock_init(self, *args, **kwargs)
        finally:
            _here.fit = False

    _tf.TFEpochIterator.__init__ = __init__


_sum_before_updates()
_draw_by_replica()
_add_losses_by_replica()
_tell_who_asks_for_data()
trainer.install(lambda strategy: isinstance(strategy, (MeshStrategy, MirroredStrategy)))
