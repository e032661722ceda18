"""The compiled functions of a stage, on a mesh of its own.

Forward; backward, which runs the stage again (recompute) or takes what the forward pass has kept; and
on the last stage forward, loss and backward at once. Which function runs when is not known here.
"""

import contextlib
import functools

import keras
import tensorflow as tf

from tfpar import accumulation, denominators
from tfpar.pipeline.residuals import Kept
from tfpar.pipeline.stage import masks_of
from tfpar.strategy import rules, trainer
from tfpar.strategy.data import lay_out_rows
from tfpar.variables import on_stage


class Compiled:
    """A function, traced for each signature of its arguments: nests of tensors and None.

    A `tf.function` finds its trace more slowly, and warns of too many.
    """

    def __init__(self, function):
        self._function = function
        self._traces: dict = {}

    def __call__(self, *args):
        key = signature(args)
        if key not in self._traces:
            compiled = tf.function(self._function, autograph=False)
            self._traces[key] = compiled.get_concrete_function(*args)
        return self._traces[key](*args)


def compiled(plan, rank, fn):
    """`fn` as a compiled step on the mesh of a stage; it takes nests of DTensors."""

    def step(*args):
        with tracing(plan, rank):
            outputs = plan.strategy.run(fn, args=args)
            check(plan)
        return outputs

    return Compiled(step)


@contextlib.contextmanager
def tracing(plan, rank):
    """For code of a stage mesh that is being traced."""
    with on_stage(rank), plan.variables_on(rank), rules.unrolled(plan.model):
        yield


def check(plan):
    """At the end of a trace: makes the graph fit for the mesh or refuses it."""
    graph = tf.compat.v1.get_default_graph()
    rules.check_graph(graph, plan.strategy.step_mesh, trainer.variable_names(plan.model))


def signature(args):
    """What a trace depends on: keys of dicts, shapes and dtypes."""
    flat = tf.nest.flatten(args)
    keys = tuple(tuple(arg) if isinstance(arg, dict) else None for arg in args)
    return keys, tuple(None if x is None else (tuple(x.shape), x.dtype) for x in flat)


class Functions:
    """The compiled functions of a stage of a compiled model.

    Args:
      stage: a `Stage`.
      plan: the `plan.Plan` that it belongs to.
    """

    def __init__(self, stage, plan):
        self.stage = stage
        self._plan = plan
        self._model = plan.model
        step = functools.partial(compiled, plan, stage.rank)
        self.forward = {
            flag: step(functools.partial(self._forward, flag)) for flag in (True, False)
        }
        self.backward = step(self._backward)
        self.train_last = step(self._train_last)
        self.test_last = step(self._test_last)
        self.predict = step(self._predict)
        self._kept: dict = {}
        self._stepped = plan.stepped[stage.rank]  # places of weights seen to have a gradient

    @property
    def _optimizer(self):
        return self._model.optimizer

    def _pinned(self, tensors):
        """Lays tensors out as they travel: by rows over `data`, else whole."""
        mesh = self._plan.strategy.step_mesh
        return tf.nest.map_structure(lambda tensor: lay_out_rows(tensor, mesh), tensors)

    def _given(self, values):
        numbers = self.stage.gives
        given = {number: values[number] for number in numbers}
        return self._pinned(given), self._pinned(masks_of(values, numbers))

    # All but the last stage.

    def _forward(self, training, values, masks):
        """Returns (values, masks, state before, losses that its layers add, a scalar to wait for)."""
        values, losses, changed = self.stage.run(values, masks, training)
        kept = self.stage.remember(changed)
        given, masks = self._given(values)
        return given, masks, kept, losses, tf.zeros(())

    def _backward(self, values, masks, kept, upstream, added, counts):
        """Runs the stage again, adds the gradients of its weights to the window's.

        Args:
          values, masks, kept: what the forward pass was given, and the state that it found.
          upstream: for each part of the gradient {number: list of gradients} of what it has given.
          added: for each part the gradients of the losses that its layers add.
          counts: for each part its denominator, a scalar.

        Returns:
          (for each part {number: gradient} of what it took, a scalar to wait for).
        """
        sources = self._sources(values)
        with tf.GradientTape(persistent=len(upstream) > 1) as tape:
            tape.watch([values[number] for number in sources])
            made, losses, _ = self.stage.run(values, masks, True, kept)
        results = []
        for part, gradients in enumerate(upstream):
            targets, grads = _targets(made, losses, gradients, added[part])
            results.append(self._apply(tape, part, targets, grads, values, counts[part]))
        return results, tf.zeros(())

    def keep(self, values, masks):
        """A forward pass that keeps what the backward pass needs; returns `forward`'s outputs and that.

        Returns:
          (what `forward` returns, what `back` takes).
        """
        key = signature((values, masks))
        if key not in self._kept:
            plan, stage = self._plan, self.stage
            stepped, self._stepped = self._stepped, set()  # of a backward pass that may never run
            run = lambda fn: lambda *args: plan.strategy.run(fn, args=args)
            with tracing(plan, stage.rank):
                kept = Kept(self._keep, run, lambda: check(plan), (values, masks))
            self._kept[key] = kept, self._stepped
            self._stepped = stepped
        outputs, residuals = self._kept[key][0].forward(values, masks)
        return outputs, (key, residuals)

    def back(self, kept, upstream, added, count):
        """The backward pass on what `keep` has kept, for a gradient of one part; as `backward`."""
        key, residuals = kept
        passes, stepped = self._kept[key]
        self._stepped.update(stepped)
        return passes.backward(residuals, upstream, added, count)

    def _keep(self, values, masks):
        sources = self._sources(values)
        with tf.GradientTape() as tape:
            tape.watch([values[number] for number in sources])
            made, losses, changed = self.stage.run(values, masks, True)
        before = self.stage.remember(changed)
        given, masks = self._given(made)

        def back(upstream, added, count):
            targets, grads = _targets(made, losses, upstream, added)
            return [self._apply(tape, 0, targets, grads, values, count)], tf.zeros(())

        wanted = [number for number in self.stage.gives if self._plan.needs_gradient[number]]
        specs = {
            number: [tf.TensorSpec(given[number].shape, given[number].dtype)]
            * len(self._plan.consumers[number])
            for number in wanted
        }
        of_losses = [tf.TensorSpec(loss.shape, loss.dtype) for loss in losses]
        outputs = given, masks, before, losses, tf.zeros(())
        return outputs, back, (specs, of_losses, tf.TensorSpec((), denominators.wide()))

    def _sources(self, values):
        return [number for number in self.stage.takes if self._plan.needs_gradient[number]]

    def _apply(self, tape, part, targets, upstream, values, count):
        """Adds gradients to the window; returns those of the values taken."""
        plan, sources = self._plan, self._sources(values)
        weights, places = plan.weights_of(self.stage)
        wanted = [weight._value for weight in weights] + [values[number] for number in sources]
        found = [None] * len(wanted)
        if targets and wanted:
            found = tape.gradient(targets, wanted, output_gradients=upstream)
        gradients, rest = found[: len(weights)], found[len(weights) :]
        self._stepped.update(p for p, g in zip(places, gradients, strict=True) if g is not None)
        self._optimizer.held(part)
        with plan.variables_on(self.stage.rank):  # those just made too
            self._optimizer.add_gradients(part, places, gradients, count)
        taken: dict = {}
        for number, gradient in zip(sources, rest, strict=True):
            if gradient is not None:  # none is not zero: a weight without gradient does not decay
                taken[number] = tf.cast(tf.convert_to_tensor(gradient), values[number].dtype)
        return self._pinned(taken)

    # The last stage.

    def _train_last(self, values, masks, others, x, y, sample_weight, rows):
        """Forward, loss, metrics and backward.

        Args:
          others: the losses that the layers of other stages add.

        Returns:
          (for each part {number: gradient} of what it took, for each part the gradients of `others`,
          for each part its denominator, for each part what the window is to be divided by for it, the
          figures of the losses for `report`).
        """
        sources = self._sources(values)
        optimizer = self._optimizer
        with denominators.take_notes(rows) as notes, tf.GradientTape(persistent=True) as tape:
            tape.watch([values[number] for number in sources] + others)
            made, added, changed = self.stage.run(values, masks, True)
            y_pred = self._predicted(made)
            added = [*others, *added]
            total, own, noted, exact = self._loss(x, y, y_pred, sample_weight, added, True, notes)
            scaled = optimizer.inner_optimizer.scale_loss(total)
        self.stage.remember(changed)
        used, rest = accumulation.what_makes(total, noted)
        if any(stage.adds_losses for stage in self._plan.stages):
            rest = "batch"
        groups, takes_rest = accumulation.grouped(used, rest)
        keys = sorted(groups, key=lambda key: key != takes_rest)  # its part comes first
        self._plan.counts_are_rows = all(_is_of_rows(group) for group in groups.values())
        remains, upstream = scaled, {}
        if len(groups) > 1:
            found = tape.gradient(scaled, [loss.value for loss in used])
            upstream = {id(loss): gradient for loss, gradient in zip(used, found)}
            apart = [x for key in keys[1:] for x in groups[key]]
            with tape:  # the part of these losses has exactly no gradient in what remains
                remains -= tf.add_n([tf.stop_gradient(upstream[id(x)]) * x.value for x in apart])
        results, of_others, counts, divisors = [], [], [], []
        for part, key in enumerate(keys):
            group = groups[key]
            count = _count(group, rows, denominators.wide())
            targets, grads = [remains], [tf.ones_like(remains)]
            if part > 0:
                targets = [x.value for x in group]
                grads = [upstream[id(x)] for x in group]
            results.append(self._apply(tape, part, targets, grads, values, count))
            found = tape.gradient(targets, others, output_gradients=grads) if others else []
            of_others.append([tf.zeros_like(x) if g is None else g for x, g in zip(others, found)])
            counts.append(count)
            divisors.append(tf.zeros_like(count) if _is_sum(group) else count)
        del tape
        self._update_metrics(y, y_pred, sample_weight)
        figures = self._figures(total, own, noted if exact else [], rows)
        return results, of_others, counts, divisors, figures

    def _test_last(self, values, masks, others, x, y, sample_weight, rows):
        """Forward, loss and metrics, without training; returns the figures of the losses."""
        with denominators.take_notes(rows) as notes:
            made, added, changed = self.stage.run(values, masks, False)
            y_pred = self._predicted(made)
            added = [*others, *added]
            found = self._loss(x, y, y_pred, sample_weight, added, False, notes)
        self.stage.remember(changed)
        self._update_metrics(y, y_pred, sample_weight)
        total, own, noted, exact = found
        return self._figures(total, own, noted if exact else [], rows)

    def _predict(self, values, masks):
        made, _, changed = self.stage.run(values, masks, False)
        self.stage.remember(changed)
        return self._predicted(made)

    def _predicted(self, values):
        graph = self._plan.graph
        return graph.structured([values[number] for number in graph.outputs])

    def _loss(self, x, y, y_pred, sample_weight, added, training, notes):
        """The loss of a micro-batch.

        Returns:
          (the total, how much of it is `added` or None, the `denominators.Loss`es noted,
          whether the rest of the total is exactly these.)
        """
        if self._plan.has_own_loss:
            total = self._own_loss(x, y, y_pred, sample_weight, added, training)
            return total, None, list(notes.losses), False
        aggregated = [self._model._aggregate_additional_loss(loss) for loss in added]
        own = tf.add_n(aggregated) if aggregated else None
        compiled = self._model._compile_loss
        if compiled is None:
            if own is None:
                raise ValueError(
                    "the model has no loss; give one to compile, or add one in a layer"
                )
            return own, own, [], False
        # Where all losses are known, their metrics are told the loss of the whole batch, by `report`.
        with keras.StatelessScope():
            loss = compiled(y, y_pred, sample_weight)
        exact = len(notes.losses) == len(compiled._flat_losses)
        if not exact:
            notes.losses.clear()
            loss = compiled(y, y_pred, sample_weight)
        return loss if own is None else loss + own, own, list(notes.losses), exact

    def _own_loss(self, x, y, y_pred, sample_weight, added, training):
        """What the model's own `compute_loss` says, whose `self.losses` are `added`."""
        model = self._model
        model._losses_override = list(added) or [tf.zeros((), denominators.wide())]
        try:
            return model._compute_loss(x, y, y_pred, sample_weight, training=training)
        finally:
            model._losses_override = []

    def _update_metrics(self, y, y_pred, sample_weight):
        if self._model._compile_metrics is not None:
            self._model._compile_metrics.update_state(y, y_pred, sample_weight=sample_weight)

    def _figures(self, total, own, noted, rows):
        """What `report.batch_loss` needs of a micro-batch, as one vector."""
        figures = [total, 0.0 if own is None else own, tf.cast(rows, denominators.wide())]
        for one in noted:
            figures += [one.value, _count([one], rows, denominators.wide())]
        self._plan.kinds = [one.kind for one in noted]
        return tf.stack([tf.cast(figure, denominators.wide()) for figure in figures])


def _targets(made, losses, upstream, added):
    """(what a stage makes and what its layers add, the gradients of these)."""
    targets = [*(made[number] for number in upstream), *losses]
    return targets, [*(tf.add_n(list(found)) for found in upstream.values()), *added]


def _is_of_rows(group):
    return not group or (group[0].kind == denominators.MEAN and group[0].count is None)


def _is_sum(group):
    return bool(group) and group[0].kind == denominators.SUM


def _count(group, rows, dtype):
    """The denominator of losses that share one."""
    if _is_sum(group):
        return tf.ones((), dtype)
    count = group[0].count if group else None
    return tf.cast(rows if count is None else count, dtype)
