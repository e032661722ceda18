"""`Pipeline`: an ordinary Keras model, cut into stages on meshes of their own."""

import functools
import inspect

import keras
import tensorflow as tf

from tfpar import _tf
from tfpar.accumulation import AccumulatingOptimizer
from tfpar.mesh import check_positive
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.graph import chained
from tfpar.pipeline.plan import Plan
from tfpar.pipeline.trip import Trips
from tfpar.strategy import trainer
from tfpar.strategy.mesh import MeshStrategy


def Pipeline(
    model,
    micro_batches,
    schedule="1f1b",
    stages="auto",
    recompute=True,
    chunks=None,
    memory=None,
):
    """Cuts a Keras model into stages that run as a pipeline::

        mesh = tfpar.Mesh(pipe=2, data=2, model=2)
        with tfpar.MeshStrategy(mesh, layouts).scope():
            model = tfpar.Pipeline(build_model, micro_batches=8)
            model.compile("adam", "mse")
        model.fit(dataset)

    What comes back is the model itself: `fit`, `evaluate`, `predict`, callbacks, `save` and the rest
    are those of the model, and the file that it saves is the plain model's. Its attribute `pipeline`
    holds the `Plan`: `print(model.pipeline.explain())`.

    Each fit batch is cut into micro-batches along its rows. They go through the stages one after the
    other, so that several stages work at the same time; the update is that of the whole batch.
    BatchNormalization, and other layers that look across rows, see a micro-batch.

    Args:
      model: a function that builds the model; a Sequential or Functional model built in the scope,
        not yet compiled; or a list of stage models, cut by hand, each fed with what the one before
        returns.
      micro_batches: into how many slices a batch is cut. A batch with fewer rows has fewer.
      schedule: "1f1b" (PipeDream-Flush), "gpipe" (Huang et al. 2019), "interleaved" (Narayanan et al.
        2021), or a table of your own (see `tfpar.pipeline.schedule`).
      stages: "auto": balanced by counted FLOPs; "measured": by a short timed run of every layer; or
        the names of the layers at which the second, third, ... stage begins.
      recompute: whether a stage runs forward again in its backward pass, and so keeps nothing but its
        inputs meanwhile; else it keeps all that the backward pass needs.
      chunks: how many stages each stage mesh runs, for "interleaved" (2 by default).
      memory: the most bytes of weights, gradients and two optimizer slots that a stage may hold.

    Returns:
      The Keras model.

    Raises:
      ValueError: outside the scope of a MeshStrategy with pipe > 1; a model that cannot be cut, or
        that is compiled already; numbers or names that do not fit.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, MeshStrategy) or strategy.mesh.pipe == 1:
        raise ValueError(
            "tfpar.Pipeline needs the scope of a MeshStrategy whose mesh has pipe > 1: `with "
            "tfpar.MeshStrategy(tfpar.Mesh(pipe=2)).scope():`; received "
            f"{getattr(strategy, 'mesh', strategy)!r}"
        )
    check_positive(micro_batches=micro_batches)
    by_hand = None
    if isinstance(model, (list, tuple)):
        by_hand = list(model)
        if stages != "auto":
            raise ValueError(f"a list of stage models is cut already; leave out stages={stages!r}")
        model = chained(by_hand)
    elif not isinstance(model, keras.layers.Layer) and callable(model):
        model = model()
    table = _table(schedule, strategy.mesh.pipe, micro_batches, chunks)
    plan = Plan(model, strategy, table, stages, recompute, by_hand, memory)
    plan.place()
    model.pipeline = plan
    return model


def _table(given, stages, micro_batches, chunks):
    table = schedules.resolve(given, stages, micro_batches, chunks)
    if any(action.kind == schedules.WEIGHTS for actions in table.ranks for action in actions):
        raise ValueError(
            "schedules that split the backward pass in two (W) can be simulated, but not run yet; "
            "give the table without W, in which B is the whole backward pass"
        )
    return table


def _check_compile(arguments, optimizer):
    """Refuses what a pipeline would not do.

    Raises:
      ValueError: run_eagerly, jit_compile, an optimizer that treats all gradients together in a way
        of its own.
    """
    for name in ("run_eagerly", "jit_compile"):
        if arguments[name] is True:
            raise ValueError(
                f"compile({name}=True) is not supported for a pipeline: its stages are compiled "
                f"functions that DTensor splits. Leave out {name}"
            )
    for one in (optimizer.inner_optimizer, _tf.innermost(optimizer.inner_optimizer)):
        stock = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
        if not any(type(one).apply is kind.apply for kind in stock):
            raise ValueError(
                f"{type(one).__name__}.apply is the optimizer's own; in a pipeline it would see the "
                "gradients of one stage mesh at a time. Override update_step, or train with pipe=1"
            )
    if optimizer.measure_noise:
        raise ValueError("measure_noise=True is not supported for a pipeline; train with pipe=1")


def _install():
    """Has Keras run a pipelined model's batches through its stages; others go their old way."""
    base, model_class = _tf.TensorFlowTrainer, _tf.Trainer
    stock_function, stock_predict = base._make_function, base.make_predict_function
    stock_compile = model_class.compile

    def plan_of(model):
        plan = getattr(model, "pipeline", None)
        return plan if isinstance(plan, Plan) else None

    def trips(plan):
        plan.trips = plan.trips or Trips(plan)
        return plan.trips

    @functools.wraps(stock_function)
    def _make_function(self, step_function):
        plan = plan_of(self)
        if plan is None:
            return stock_function(self, step_function)
        ours = trips(plan)
        return trainer.execution(
            self, ours.train if step_function == self.train_step else ours.test
        )

    @functools.wraps(stock_predict)
    def make_predict_function(self, force=False):
        plan = plan_of(self)
        if plan is None:
            return stock_predict(self, force)
        if self.predict_function is None or force:
            self.predict_function = trips(plan).predict
        return self.predict_function

    @functools.wraps(stock_compile)
    def compile(self, *args, **kwargs):
        plan = plan_of(self)
        if plan is None:
            return stock_compile(self, *args, **kwargs)
        bound = inspect.signature(stock_compile).bind(self, *args, **kwargs)
        bound.apply_defaults()
        optimizer = bound.arguments["optimizer"]
        if not isinstance(optimizer, AccumulatingOptimizer):
            optimizer = bound.arguments["optimizer"] = AccumulatingOptimizer(optimizer, 1)
        _check_compile(bound.arguments, optimizer)
        bound.arguments["jit_compile"] = False
        plan.forget_compiled()
        optimizer._finish = lambda: trips(plan).update.update()
        return stock_compile(*bound.args, **bound.kwargs)

    base._make_function = _make_function
    base.make_predict_function = make_predict_function
    model_class.compile = compile


_install()
