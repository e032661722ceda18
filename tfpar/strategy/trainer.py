"""How Keras' `fit`, `evaluate`, `predict` and the `*_on_batch` methods run a step on a mesh.

Keras compiles a step in `TensorFlowTrainer`; its own way hands plain tensors to the compiled
function where a mesh needs DTensors (`train_on_batch`), and draws a batch from the data to build a
model (which moves shuffles on). For models built in a MeshStrategy's scope, and for these alone,
the functions below take the place of four methods.
"""

import contextlib

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import _tf
from tfpar.strategy import activations, rules, vocabulary
from tfpar.strategy import data as data_lib
from tfpar.variables import ShardedVariable, in_step, to_host


def replicate(outputs, mesh):
    """In a step: lays every tensor of the nest `outputs` out whole on every device."""

    def one(value):
        if not tf.is_tensor(value):
            return value
        return dtensor.relayout(value, mesh.layout((None,) * value.shape.rank))

    return tf.nest.map_structure(one, outputs)


class Step:
    """A step function of a Keras model, compiled for its strategy's mesh.

    Takes a batch, a nest of host values or DTensors, and returns DTensors that the devices may
    still be working on, whole on every device.
    """

    def __init__(self, model, strategy, step_function):
        self._model = model
        self._strategy = strategy
        self._step_function = step_function
        self._checked = False
        self._call = self._run if model.run_eagerly else tf.function(self._run, autograph=False)

    def __call__(self, batch):
        if not self._checked:
            check_model(self._model, self._strategy)
            self._checked = True
        packed = self._strategy.pack(batch)
        try:
            return self._call(packed)
        except tf.errors.OpError as error:
            known = rules.explain_failure(error)
            if known is None:
                raise
            raise known from error

    def _run(self, batch):
        with rules.unrolled(self._model):
            return run(self._strategy, self._step_function, (batch,), variable_names(self._model))


def run(strategy, fn, args, names):
    """Runs `fn` as a step; in a trace, also makes the traced graph fit for the mesh."""
    outputs = strategy.run(fn, args=args)
    if tf.executing_eagerly():
        return outputs
    outputs = replicate(outputs, strategy.step_mesh)
    rules.check_graph(tf.compat.v1.get_default_graph(), strategy.step_mesh, names)
    return outputs


def compiled(strategy, fn):
    """A function that runs `fn`, which takes and returns nothing, as a compiled step."""
    function = tf.function(lambda: run(strategy, fn, (), {}), autograph=False)

    def call():
        with dtensor.default_mesh(strategy.step_mesh.dtensor_mesh):
            function()

    return call


def when(condition, fn):
    """Calls `fn`, which returns nothing, if a boolean tensor says so; in a trace too."""
    if not tf.executing_eagerly():
        tf.cond(condition, fn, lambda: None)
    elif bool(to_host(condition)):
        fn()


def update_replicas(strategy, optimizer, update, args, variables):
    """In cross-replica context: has every replica make an update.

    Weights are overwritten with their averages afterwards: replicas cannot enter that condition.

    Args:
      optimizer: the innermost optimizer.
      update: what each replica calls with its values of `args`.
      variables: all weights of the optimizer.
    """
    with _tf.without_overwriting(optimizer) as (frequency, overwrite):
        strategy.extended.call_for_each_replica(update, args=args)
    if frequency is not None:
        updates = tf.convert_to_tensor(optimizer.iterations.value)
        due = tf.logical_and(updates > 0, updates % frequency == 0)
        when(due, lambda: overwrite(variables))


def refuse_jit(model, strategy, why):
    """Refuses compile(jit_compile=True).

    Raises:
      ValueError: says why.
    """
    if getattr(model, "_jit_compile", None) and model.compiled:
        raise ValueError(
            f"compile(jit_compile=True) is not supported under {type(strategy).__name__}: {why}. "
            "Leave jit_compile out"
        )


def _variables(model):
    """All variables that a step of `model` may touch."""
    optimizer = getattr(model, "optimizer", None)
    found = list(model.variables) + list(optimizer.variables if optimizer else [])
    return found + [v for metric in model.metrics for v in metric.variables]


def variable_names(model):
    """{id of a variable's handle: its path}, for messages about variables off the mesh."""
    return {id(v.handle): f"variable {v.path!r}" for v in _variables(model)}


def check_model(model, strategy):
    """Refuses, before the first step, what a step on the mesh would compute wrong.

    Raises:
      ValueError: jit_compile=True, a model without pipeline where pipe > 1, variables that are not on
        the strategy's mesh, or a rule of the LayoutMap that caught no weight.
    """
    refuse_jit(model, strategy, "DTensor splits a step before XLA could see it")
    mesh = strategy.step_mesh.dtensor_mesh
    for variable in _variables(model):
        inside = variable.value
        if not isinstance(inside, ShardedVariable):
            raise rules.UnsupportedStep(rules.outside_scope(f"variable {variable.path!r}"))
        if inside.layout.mesh != mesh:
            raise rules.UnsupportedStep(
                f"variable {variable.path!r} belongs to the mesh of another strategy; build the "
                "whole model, its optimizer and metrics in one strategy's scope"
            )
    strategy.check_layouts(model)


def make_function(model, strategy, step_function, before=None):
    """What Keras calls once for each execution, with an iterator over batches.

    Args:
      step_function: takes a batch, or the last slice of one.
      before: takes each earlier slice of a batch; None if batches are not sliced.
    """
    step = Step(model, strategy, step_function)
    before = before and Step(model, strategy, before)

    def slices(batch):
        *early, last = data_lib.cut(batch, strategy.micro_batches) if before else [batch]
        for piece in early:
            before(piece)
        return step(last)

    return execution(model, slices, ahead=True)


def execution(model, step, ahead=False):
    """What Keras calls once for each execution, with an iterator over batches.

    Args:
      model: the Keras model, which says how many steps an execution has.
      step: takes a batch, returns its logs.
      ahead: whether to take the next batch while the devices still work on this one.
    """

    def function(iterator):
        outputs = None
        for _, batch in zip(range(model.steps_per_execution), iterator):
            outputs = step(batch)
            if ahead and hasattr(iterator, "prepare"):
                iterator.prepare()
        if outputs is None:
            raise StopIteration
        return tf.nest.map_structure(to_host, outputs)

    return function


def joined(parts):
    """Outputs for consecutive rows, one nest."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(lambda *pieces: tf.concat(pieces, 0), *parts)


def make_predict_function(model, strategy):
    """What Keras calls once for each execution, with a list of batches."""
    step = Step(model, strategy, model.predict_step)

    def function(batches):
        return joined([tf.nest.map_structure(to_host, step(batch)) for batch in batches])

    return function


@contextlib.contextmanager
def on_host(model):
    """Gives `model` plain variables with the same values for a while, for exporting it."""
    variables = {id(v): v for v in model.variables}.values()
    held = [v.value for v in variables]
    for variable in variables:
        plain = tf.Variable(variable.numpy(), trainable=variable.trainable, name=variable.name)
        variable._value = plain
    try:
        yield
    finally:
        for variable, sharded in zip(variables, held):
            variable._value = sharded


def install(is_ours):
    """Puts the functions above in place of Keras' own, once a process.

    Args:
      is_ours: tells whether a strategy is a MeshStrategy.
    """
    base = _tf.TensorFlowTrainer
    stock_function, stock_predict = base._make_function, base.make_predict_function
    stock_build, stock_export = base._maybe_symbolic_build, keras.Model.export
    stock_scatter = _tf.core.scatter

    def _make_function(self, step_function):
        if not is_ours(self._distribute_strategy):
            return stock_function(self, step_function)
        return self._distribute_strategy.make_function(self, step_function)

    def predict_function(self, force=False):
        if not is_ours(self._distribute_strategy):
            return stock_predict(self, force)
        if self.predict_function is None or force:
            self.predict_function = self._distribute_strategy.make_predict_function(self)
        return self.predict_function

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if not is_ours(self._distribute_strategy):
            return stock_build(self, iterator, data_batch)
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and optimizer._distribution_strategy is not (
            self._distribute_strategy
        ):
            raise rules.UnsupportedStep(rules.outside_scope(f"optimizer {optimizer.name!r}"))
        if iterator is not None:
            data_batch = iterator._distributed_dataset.example()
        data_batch = tf.nest.map_structure(
            lambda v: v if v is None or hasattr(v, "shape") else tf.convert_to_tensor(v), data_batch
        )
        with self._distribute_strategy.scope():
            self._symbolic_build(data_batch=data_batch)

    def export(self, *args, **kwargs):
        if not is_ours(self._distribute_strategy):
            return stock_export(self, *args, **kwargs)
        with on_host(self):
            return stock_export(self, *args, **kwargs)

    def scatter(indices, values, shape):
        # DTensor's rule for it makes an int32 shape, which int64 indices do not go with.
        return stock_scatter(tf.cast(indices, tf.int32) if in_step() else indices, values, shape)

    base._make_function = _make_function
    base.make_predict_function = predict_function
    base._maybe_symbolic_build = _maybe_symbolic_build
    export.__doc__ = stock_export.__doc__
    keras.Model.export = export
    _tf.core.scatter = scatter
    activations.install()
    vocabulary.install()
