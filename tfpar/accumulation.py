"""Gradient accumulation: a window of micro-batches makes the update of one big batch.

The inner optimizer, its schedule, EMA, clipping and weight decay see updates, never micro-batches.
A micro-batch weighs by what its own losses were divided by (see `tfpar.denominators`), so windows
of uneven batches and of different masks are those of one batch of all their rows.
"""

import functools
import inspect
import warnings

import keras
import tensorflow as tf

from tfpar import _tf, denominators
from tfpar.strategy import trainer
from tfpar.strategy.mesh import MeshStrategy
from tfpar.strategy.mirrored import MirroredStrategy  # noqa: F401  its trainer comes before ours


class _Part:
    """What losses of a step that share a denominator add to the window.

    Attributes:
      kind: `denominators.MEAN` or `denominators.SUM`.
      count: the denominator, a number or scalar tensor; 1 for a sum.
      factor: what makes of the gradient that of the sum which was divided.
      gradients: one per variable of the step, or None.
    """

    def __init__(self, losses, rows, gradients, replicas):
        self.kind = losses[0].kind if losses else denominators.MEAN
        count = losses[0].count if losses else None
        self.count = 1 if self.kind == denominators.SUM else rows if count is None else count
        self.factor = self.count
        if self.kind == denominators.MEAN and replicas > 1:
            wide = tf.cast(self.count, denominators.wide())
            if denominators.keras_divides():
                self.factor = wide * replicas
            elif denominators.summed_over_replicas():
                self.factor = losses[0].whole if losses else denominators.share(wide)[1]
        self.gradients = gradients


class _Held:
    """What the open window holds of one part of the gradient.

    Attributes:
      count: a variable: the sum of the denominators; 0 if the part is a sum.
      accumulators: a variable per weight: the sum of the gradients, times their denominators.
    """

    def __init__(self, count, accumulators):
        self.count = count
        self.accumulators = accumulators


@keras.saving.register_keras_serializable("tfpar")
class AccumulatingOptimizer(keras.optimizers.Optimizer):
    """Makes one update of a Keras optimizer for a window of micro-batches::

        model.compile(tfpar.AccumulatingOptimizer(keras.optimizers.AdamW(3e-4), steps=4), ...)

    The update is the one that a single batch of all the window's rows would make. `fit` closes an
    open window at the end of each epoch, with the micro-batches that it really holds; in a loop of
    your own call `finish_window`.

    Memory: one accumulator per weight, in the weight's own layout, float32 or wider. A second one
    is needed only where two losses of a step have denominators of their own, such as two outputs
    with different masks.

    `save` writes the inner optimizer in place of this one, so that any process loads the file; an
    open window goes into a `tf.train.Checkpoint` only.

    Args:
      optimizer: a Keras optimizer, or what `keras.optimizers.get` takes.
      steps: micro-batches in a window: an int, or a function from the number of updates so far (an
        int64 tensor) to it, for a batch size that grows.
      measure_noise: whether to keep the norms that `tfpar.scaling.NoiseScale` needs.
      name: the optimizer's name.

    Raises:
      ValueError: steps below 1, an optimizer that accumulates already.
    """

    holds_gradients = True  # what ZeRO splits from its second stage on

    def __init__(self, optimizer, steps, measure_noise=False, name="accumulating"):
        optimizer = keras.optimizers.get(optimizer)
        _check(optimizer, steps)
        super().__init__(learning_rate=0.0, name=name)
        self._not_ours = len(self._variables)  # a counter and a rate that the inner one has too
        self._inner = optimizer
        self._given = optimizer
        self._steps = steps if callable(steps) else int(steps)
        self._held = []
        self._stepped = []  # the places of the variables that had a gradient in the last trace
        self._finish = None
        self.measure_noise = measure_noise

    @property
    def inner_optimizer(self):
        """The Keras optimizer that makes the updates."""
        return self._inner

    @property
    def iterations(self):
        """The number of updates so far, a Keras variable."""
        return self._inner.iterations

    @property
    def window_size(self):
        """How many micro-batches the window that is open now will hold (an int)."""
        updates = tf.constant(self.iterations.numpy(), tf.int64)
        return int(self._window(updates))

    @property
    def has_updated(self):
        """Whether no window is open: the last micro-batch, if any, led to an update."""
        return not self.built or int(self.micro_step.numpy()) == 0

    @property
    def learning_rate(self):
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate):
        self._inner.learning_rate = learning_rate

    def __setattr__(self, name, value):
        # What a LossScaleOptimizer does to the optimizer that it is put around.
        if name == "loss_scale_factor" and hasattr(self, "_steps"):
            raise ValueError(
                "a LossScaleOptimizer around an AccumulatingOptimizer would drop single "
                "micro-batches of a window; nest them the other way round: "
                "AccumulatingOptimizer(LossScaleOptimizer(optimizer), steps)"
            )
        super().__setattr__(name, value)

    @property
    def variables(self):
        return self._inner.variables + self._variables[self._not_ours :]

    def build(self, variables):
        """Makes the state: that of the inner optimizer, `micro_step` and the accumulators."""
        if self.built:
            return
        strategy = tf.distribute.get_strategy()
        if not tf.distribute.has_strategy():
            strategy = self._distribution_strategy
        for optimizer in (self, self._inner, _tf.innermost(self._inner)):
            if optimizer._distribution_strategy is not strategy:
                raise ValueError(
                    f"optimizer {optimizer.name!r} was created outside the scope of the "
                    f"{type(strategy).__name__} that it is used in; create it inside "
                    "`with strategy.scope():`"
                )
        if strategy is not tf.distribute.get_strategy():
            with strategy.scope():
                return self.build(variables)
        for variable in variables:
            if getattr(variable, "overwrite_with_gradient", False):
                raise ValueError(
                    f"variable {variable.path!r} is overwritten by its gradient (float8 scales), "
                    "which a window cannot average; accumulate in another dtype policy"
                )
        self._inner.build(variables)
        super().build(variables)
        # Micro-batches in the open window so far.
        self.micro_step = self._new((), "int64", "micro_step", aggregation="only_first_replica")
        self._hold()
        if self.measure_noise:
            if self._replicas > 1:
                raise ValueError(
                    "measure_noise=True is not supported over several replicas; use a MeshStrategy"
                )
            wide = self._held[0].count.dtype
            self._norms = self._new((3,), wide, "norms")  # sums of the open window
            self._noise = self._new((4,), wide, "noise")  # of the last window

    def noise_measurement(self):
        """What the last window tells of gradient noise, as `tfpar.scaling.noise_scale` takes it.

        Returns:
          Four floats: mean squared norm of the micro-batches' gradients, mean of 1 / their weight,
          squared norm of the window's gradient, weight of the window.
        """
        return tuple(float(value) for value in self._noise.numpy())

    def scale_loss(self, loss):
        """Takes note of the step's loss; Keras' `train_step` calls it before the gradient."""
        here = denominators.notes()
        if here is None:
            return self._inner.scale_loss(loss)
        loss = tf.identity(loss)
        scaled = self._inner.scale_loss(loss)
        here.totals[id(self)] = loss, scaled
        return scaled

    def apply(self, grads, trainable_variables=None, weight=None):
        """Adds a micro-batch to the window, and makes the update if that completes it.

        Args:
          grads: list of gradients of the micro-batch's mean loss, one per variable: tensors,
            `tf.IndexedSlices` or None.
          trainable_variables: the variables; may be left out once built.
          weight: what the loss was divided by: rows, tokens. Keras' own steps know it; in a loop of
            your own, micro-batches weigh alike unless it is given.
        """
        grads = list(grads)
        if not grads:
            return
        variables = list(trainable_variables or self._trainable_variables)
        if not self.built:
            self.build(variables)
        self._check_variables_are_known(variables)
        parts = self._parts(grads, variables, weight)
        self._stepped = [
            self._get_variable_index(variable)
            for variable, *found in zip(variables, *(part.gradients for part in parts))
            if any(gradient is not None for gradient in found)
        ]
        for k, part in enumerate(parts):
            self._add(part, self.held(k), variables)
        if self.measure_noise:
            self._measure(parts)
        here = denominators.notes()
        if here is None or here.last:
            self._in_one_place(self._count, [_computed(parts)])

    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars)
        self.apply(grads, variables)
        return self.iterations

    def finish_window(self):
        """Makes the update of an open window now, with the micro-batches that it holds.

        `fit` does so at the end of each epoch. Without an open window nothing happens.
        """
        if self.has_updated:
            return
        if self._finish is None:
            step = functools.partial(self._in_one_place, self._close)
            strategy = self._distribution_strategy
            if isinstance(strategy, MeshStrategy):
                self._finish = trainer.compiled(strategy, step)
            else:
                self._finish = tf.function(lambda: strategy.run(step), autograph=False)
        self._finish()

    def finalize_variable_values(self, var_list):
        self._inner.finalize_variable_values(var_list)

    # A micro-batch: its gradient, part by part.

    def _parts(self, grads, variables, weight):
        """The parts of a micro-batch's gradient, one for each denominator among its losses."""
        here = denominators.notes()
        part = functools.partial(_Part, replicas=self._replicas)
        if weight is not None or here is None:
            return [part([], 1 if weight is None else weight, grads)]
        losses, here.losses = here.losses, []
        total, scaled = here.totals.pop(id(self), (None, None))
        if total is None or tf.executing_eagerly():
            return [part(_alike(losses), here.rows, grads)]
        losses, rest = what_makes(total, losses)
        if not losses and self._replicas > 1:
            raise ValueError(
                "the loss of this step is not one of Keras' losses: over several replicas nobody "
                "can tell whether it is scaled by their number. Use a keras.losses.Loss, say "
                "tfpar.weigh(loss, count) of a loss scaled by it, or use a MeshStrategy"
            )
        groups, takes_rest = grouped(losses, rest)
        if len(groups) == 1:
            (group,) = groups.values()
            return [part(group, here.rows, grads)]
        upstream = tf.gradients(scaled, [loss.value for loss in losses])
        upstream = {id(loss): gradient for loss, gradient in zip(losses, upstream)}
        values = [getattr(variable, "value", variable) for variable in variables]
        parts = []
        for key, group in groups.items():
            if key == takes_rest:
                others = [loss.value for loss in losses if loss not in group]
                found = tf.gradients(scaled, values, stop_gradients=others)
            else:
                ys = [loss.value for loss in group]
                found = tf.gradients(ys, values, grad_ys=[upstream[id(loss)] for loss in group])
            parts.append(part(group, here.rows, found))
        return parts

    @property
    def _replicas(self):
        return self._distribution_strategy.num_replicas_in_sync

    def _add(self, part, held, variables):
        """Adds a part of a micro-batch's gradient to what the window holds."""
        if part.kind == denominators.MEAN:
            with tf.control_dependencies(_computed([part])):
                held.count.value.assign_add(tf.cast(part.count, held.count.dtype))
        places = [self._get_variable_index(variable) for variable in variables]
        self.add_gradients(self._held.index(held), places, part.gradients, part.factor)

    def add_gradients(self, part, places, gradients, factor):
        """Adds gradients, times a factor, to those that the window holds.

        Args:
          part: which part of the gradient, an int: each denominator among the losses has its own.
          places: where the weights stand among the optimizer's.
          gradients: one per weight: tensors, `tf.IndexedSlices` or None.
          factor: a number or scalar tensor.
        """
        for gradient, place in zip(gradients, places, strict=True):
            if gradient is None:
                continue
            accumulator = self.held(part).accumulators[place].value
            by = tf.cast(factor, accumulator.dtype)
            if self._replicas > 1:  # a replica without rows may have gradients of 0 / 0
                gradient = tf.convert_to_tensor(gradient)
                wide = tf.cast(gradient, accumulator.dtype)
                accumulator.assign_add(tf.math.multiply_no_nan(wide, by))
            elif isinstance(gradient, tf.IndexedSlices):
                rows = tf.cast(gradient.values, accumulator.dtype) * by
                accumulator.scatter_add(tf.IndexedSlices(rows, gradient.indices))
            else:
                accumulator.assign_add(tf.cast(gradient, accumulator.dtype) * by)

    def held(self, part):
        """What the window holds of one part of the gradient, made if there is none."""
        while part >= len(self._held):
            with tf.init_scope():
                self._hold()
        return self._held[part]

    def _measure(self, parts):
        if len(parts) > 1 or parts[0].kind != denominators.MEAN:
            raise ValueError(
                "measure_noise=True needs a loss that is one mean; this step sums losses, or has "
                f"{len(parts)} with denominators of their own"
            )
        dtype = self._norms.dtype
        weight = tf.cast(parts[0].count, dtype)
        norm = squared_norm(parts[0].gradients, dtype)
        one = tf.ones((), dtype)
        self._norms.value.assign_add(tf.stack([norm, tf.math.reciprocal_no_nan(weight), one]))

    # The window.

    def _window(self, updates):
        """The size of the window after so many updates (an int64 tensor)."""
        if not callable(self._steps):
            return tf.constant(self._steps, tf.int64)
        return tf.maximum(tf.cast(self._steps(updates), tf.int64), 1)

    def _in_one_place(self, fn, args=()):
        """Calls `fn` once for all replicas, which a condition around an update demands."""
        if tf.__internal__.distribute.strategy_supports_no_merge_call():
            fn(*args)
        else:
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy, *args: fn(*args), args)

    def _count(self, computed):
        """Counts a micro-batch, once the tensors `computed` are there, and closes a full window."""
        local = self._distribution_strategy.experimental_local_results
        with tf.control_dependencies([tensor for value in computed for tensor in local(value)]):
            self.micro_step.value.assign_add(tf.ones((), tf.int64))
        full = self.micro_step.value >= self._window(tf.convert_to_tensor(self.iterations.value))
        trainer.when(full, self._close)

    def _close(self):
        """Makes the update of the window and empties it."""
        optimizer = _tf.innermost(self._inner)
        with _tf.reduced_already(optimizer):
            if tf.distribute.in_cross_replica_context():
                strategy, weights = self._distribution_strategy, self._trainable_variables
                trainer.update_replicas(strategy, optimizer, self._update, (), weights)
            else:
                self._update()
        self.micro_step.value.assign(tf.zeros((), tf.int64))

    def _update(self):
        places = self._stepped or range(len(self._trainable_variables))
        gradients = self.gradients_of(places)
        if self.measure_noise:
            small, inverse, many = tf.unstack(tf.convert_to_tensor(self._norms.value))
            small, inverse = small / many, inverse / many
            big = squared_norm(gradients, self._noise.dtype)
            self._noise.value.assign(tf.stack([small, inverse, big, self._held[0].count.value]))
            self._norms.value.assign(tf.zeros((3,), self._norms.dtype))
        self._inner.apply(gradients, [self._trainable_variables[place] for place in places])
        self.empty(range(len(self._trainable_variables)))

    def gradients_of(self, places):
        """The gradients of the window so far, for the weights at `places`."""
        gradients = [0.0] * len(places)
        for held in self._held:
            sums = [held.count.value] + [held.accumulators[place].value for place in places]
            sums = [tf.convert_to_tensor(value) for value in sums]
            if self._replicas > 1:
                context = tf.distribute.get_replica_context()
                sums = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
            count, *sums = sums
            count = tf.where(count == 0, tf.ones_like(count), count)
            sums = [value / tf.cast(count, value.dtype) for value in sums]
            gradients = [gradient + value for gradient, value in zip(gradients, sums)]
        return gradients

    def empty(self, places):
        """Forgets what the window holds for the weights at `places`."""
        for held in self._held:
            for variable in (held.count, *(held.accumulators[place] for place in places)):
                variable.value.assign(tf.zeros(variable.shape, variable.dtype))

    def _hold(self):
        """Makes the count and the accumulators of one more part of the gradient."""
        k = len(self._held)
        local = dict(aggregation="sum", synchronization="on_read")  # each replica has its own
        count = self._new((), denominators.wide(), f"count_{k}", **local)
        accumulators = []
        for variable in self._trainable_variables:
            dtype = "float32" if variable.dtype in ("float16", "bfloat16") else variable.dtype
            name = f"{variable.path.replace('/', '_')}_accumulator_{k}"
            with self._distribution_strategy.extended.colocate_vars_with(variable.value):
                accumulators.append(self._new(variable.shape, dtype, name, **local))
        self._held.append(_Held(count, accumulators))

    def _new(self, shape, dtype, name, **kwargs):
        with keras.name_scope(self.name, caller=self):
            variable = keras.Variable(
                "zeros", shape=shape, dtype=dtype, trainable=False, name=name, **kwargs
            )
        self._track_variable(variable)
        return variable

    # Files.

    def __dir__(self):
        # Keras' savers walk the attributes; the inner optimizer is saved in our place.
        return [
            name
            for name in super().__dir__()
            if name not in ("inner_optimizer", "_inner", "_given")
        ]

    def save_own_variables(self, store):
        if not self.has_updated:
            warnings.warn(
                f"saved with {int(self.micro_step.numpy())} micro-batches in an open window: they "
                "are not in this file. Use tf.train.Checkpoint to resume inside a window, or call "
                "optimizer.finish_window() before saving"
            )
        self._inner.save_own_variables(store)

    def load_own_variables(self, store):
        self._inner.load_own_variables(store)

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        steps = serialize(self._steps) if callable(self._steps) else self._steps
        config = {"optimizer": serialize(self._given), "steps": steps, "name": self.name}
        return {**config, "measure_noise": self.measure_noise}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        deserialize = functools.partial(
            keras.saving.deserialize_keras_object, custom_objects=custom_objects
        )
        steps = config["steps"]
        if isinstance(steps, dict):
            steps = deserialize(steps)
        given = {**config, "optimizer": deserialize(config["optimizer"]), "steps": steps}
        return cls(**given)

    def scale_losses(self):
        """Puts a `LossScaleOptimizer` around the inner optimizer, as `compile` does for float16."""
        if not isinstance(self._inner, keras.optimizers.LossScaleOptimizer):
            if self.built:
                raise ValueError(
                    "an AccumulatingOptimizer that has trained in another dtype policy cannot "
                    "start to scale losses; make a new one"
                )
            self._inner = keras.optimizers.LossScaleOptimizer(self._inner)


def squared_norm(gradients, dtype):
    """The sum of squares of all entries of a list of gradients."""
    dense = [tf.convert_to_tensor(g) for g in gradients if g is not None]
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(g, dtype))) for g in dense])


def _computed(parts):
    """The gradients of a traced step, for its counters to wait for.

    A step that finds no more data is broken off: what does not depend on the data has then
    happened already.
    """
    if tf.executing_eagerly():
        return []
    gradients = [g for part in parts for g in part.gradients if g is not None]
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def _check(optimizer, steps):
    if isinstance(optimizer, AccumulatingOptimizer):
        raise ValueError(
            "the optimizer is an AccumulatingOptimizer already; give it the product of both steps"
        )
    stock = _tf.innermost(optimizer).gradient_accumulation_steps
    if stock:
        raise ValueError(
            f"the optimizer has gradient_accumulation_steps={stock} of its own; leave it out, "
            f"steps={steps!r} takes its place"
        )
    if not callable(steps) and (isinstance(steps, bool) or steps != int(steps) or steps < 1):
        raise ValueError(
            "steps must be a whole number of at least 1, or a function from the number of updates "
            f"to one; received {steps!r}"
        )


def _alike(losses):
    """`losses` that share a gradient, if one denominator serves them all.

    Raises:
      ValueError: they have denominators of their own.
    """
    own = [x for x in losses if x.kind == denominators.SUM or x.count is not None]
    if own and len(losses) > 1:
        raise ValueError(
            f"{len(losses)} losses of this step have denominators of their own (masks, weights, "
            "sums), and their gradients come summed up, so that a window cannot weigh them. Leave "
            "run_eagerly out, and in a train_step of your own call optimizer.scale_loss(loss) "
            "before the gradient as Keras' does; or make them one loss, tfpar.weigh(loss, count)"
        )
    return losses


def grouped(losses, rest):
    """Groups the losses of a step by their denominators.

    Args:
      losses: list of `denominators.Loss`.
      rest: what else the total depends on, as `what_makes` says.

    Returns:
      (groups, takes_rest): {key: list of losses that share a denominator, "rows" for those divided by
      the rows}, and the key of the group that the rest of the total goes with, or None.
    """
    groups: dict = {}
    for loss in losses:
        by_rows = loss.kind == denominators.MEAN and loss.count is None
        groups.setdefault("rows" if by_rows else id(loss), []).append(loss)
    means = [key for key, group in groups.items() if group[0].kind == denominators.MEAN]
    if not groups or rest == "batch" or (rest == "constant" and not means):
        groups.setdefault("rows", [])
        means.append("rows")
    return groups, "rows" if "rows" in groups else (means or [None])[0]


def what_makes(total, losses):
    """What the loss of a traced step is made of.

    Args:
      total: a scalar tensor of a graph.
      losses: list of `denominators.Loss`.

    Returns:
      (those of `losses` that `total` depends on, what else it depends on: None, "constant" for
      weights alone, which do not change in a window, or "batch").
    """
    by_name = {loss.value.name: loss for loss in losses}
    used, rest, seen, stack = [], None, set(), [total]
    while stack:
        tensor = stack.pop()
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        op = tensor.op
        if tensor.name in by_name:
            used.append(by_name[tensor.name])
        elif op.type == "ReadVariableOp":
            rest = rest or "constant"
        elif op.type != "Const":
            if not op.inputs or op.op_def.is_stateful:
                rest = "batch"
            stack.extend(op.inputs)
    return [loss for loss in losses if loss in used], rest


class _FinishWindows(keras.callbacks.Callback):
    """Closes the open window at the end of an epoch, before it is evaluated or saved."""

    def on_test_begin(self, logs=None):
        self.model.optimizer.finish_window()

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.finish_window()


def install():
    """Has Keras' trainer tell an `AccumulatingOptimizer` what it must know.

    Models with other optimizers go their old way.
    """
    base, model = _tf.TensorFlowTrainer, _tf.Trainer
    stock_function, stock_fit = base._make_function, base.fit
    stock_compile, stock_config = model.compile, model.get_compile_config

    def accumulating(self):
        return isinstance(getattr(self, "optimizer", None), AccumulatingOptimizer)

    @functools.wraps(stock_function)
    def _make_function(self, step_function):
        if not accumulating(self):
            return stock_function(self, step_function)

        def noted(last):
            @functools.wraps(step_function)
            def step(data):
                with denominators.take_notes(denominators.rows_of(data), last):
                    return step_function(data)

            return step

        strategy = self._distribute_strategy
        if step_function == self.train_step and getattr(strategy, "micro_batches", 1) > 1:
            return trainer.make_function(self, strategy, noted(True), before=noted(False))
        return stock_function(self, noted(True))

    @functools.wraps(stock_fit)
    def fit(self, *args, **kwargs):
        if accumulating(self):
            bound = inspect.signature(stock_fit).bind(self, *args, **kwargs)
            callbacks = bound.arguments.get("callbacks")
            if isinstance(callbacks, keras.callbacks.CallbackList):
                first = _FinishWindows()
                first.set_model(self)
                callbacks.callbacks.insert(0, first)
            else:
                callbacks = tf.nest.flatten(callbacks) if callbacks is not None else []
                bound.arguments["callbacks"] = [_FinishWindows(), *callbacks]
            args, kwargs = bound.args[1:], bound.kwargs
        return stock_fit(self, *args, **kwargs)

    @functools.wraps(stock_compile)
    def compile(self, *args, **kwargs):
        bound = inspect.signature(stock_compile).bind(self, *args, **kwargs)
        bound.apply_defaults()
        optimizer = bound.arguments["optimizer"]
        sliced = getattr(self._distribute_strategy, "micro_batches", 1) > 1
        if sliced and not isinstance(optimizer, AccumulatingOptimizer):
            optimizer = bound.arguments["optimizer"] = AccumulatingOptimizer(optimizer, 1)
        if isinstance(optimizer, AccumulatingOptimizer):
            if bound.arguments["auto_scale_loss"] and self.dtype_policy.name == "mixed_float16":
                optimizer.scale_losses()
            bound.arguments["auto_scale_loss"] = False
            if bound.arguments["jit_compile"] is True and optimizer._replicas > 1:
                raise ValueError(
                    "compile(jit_compile=True) is not supported over several replicas: TensorFlow "
                    "cannot compile a step that they share. Leave jit_compile out"
                )
        return stock_compile(*bound.args, **bound.kwargs)

    @functools.wraps(stock_config)
    def get_compile_config(self):
        config = stock_config(self)
        if config and accumulating(self):
            config["optimizer"] = config["optimizer"]["config"]["optimizer"]
        return config

    base._make_function = _make_function
    base.fit = fit
    model.compile = compile
    model.get_compile_config = get_compile_config


install()
