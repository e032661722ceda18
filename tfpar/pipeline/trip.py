"""A batch's trip through the stages of a pipelined model."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf

from tfpar import denominators
from tfpar.collectives import hop
from tfpar.pipeline import driver, report
from tfpar.pipeline.blame import Blame, StageError
from tfpar.pipeline.functions import Functions, compiled, signature
from tfpar.pipeline.schedule import BACKWARD, FORWARD
from tfpar.pipeline.update import Update
from tfpar.strategy import data as data_lib
from tfpar.strategy import trainer
from tfpar.variables import to_host

TRAIN, TEST, PREDICT = "train", "test", "predict"


class Trips:
    """Takes batches through the stages of a compiled model.

    Args:
      plan: the `plan.Plan`.
    """

    def __init__(self, plan):
        self.plan = plan
        self.functions = [Functions(stage, plan) for stage in plan.stages]
        self._report = compiled(plan, plan.stages[-1].rank, self._tell)
        self._known: dict = {}  # mode and signature: whether all losses are divided by the rows
        self.scalar = functools.lru_cache(maxsize=1000)(self._scalar)
        self.tables = functools.cache(self._tables)

    @functools.cached_property
    def update(self):
        """The `Update` of the model's optimizer."""
        return Update(self.plan)

    def train(self, batch):
        """Trains on one batch of host values; returns the logs."""
        with self._travelling(batch, TRAIN) as trip:
            divisors = np.sum([[float(to_host(d)) for d in one] for one in trip.divisors], axis=0)
            figures = trip.figures_on_host()
        self.update.finish_batch(list(divisors))
        return self._tell_loss(figures)

    def test(self, batch):
        """Evaluates one batch of host values; returns the logs."""
        with self._travelling(batch, TEST) as trip:
            figures = trip.figures_on_host()
        return self._tell_loss(figures)

    def predict(self, batches):
        """The outputs for a list of batches of host values, on the host."""
        outputs = []
        for batch in batches:
            with self._travelling(batch, PREDICT) as trip:
                outputs += trip.predicted_on_host()
        return trainer.joined(outputs)

    @contextlib.contextmanager
    def _travelling(self, batch, mode):
        """Takes a batch through the stages; an error leaves no work and no gradients behind."""
        plan = self.plan
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        x = plan.graph.standardized(data_lib.to_tensors(x))
        rest = data_lib.to_tensors((y, sample_weight))
        slices = data_lib.cut((x, *rest), plan.schedule.micro_batches, plan.meshes[0].data)
        trip = Trip(self, slices, mode)
        try:
            self._walk(trip)
            yield trip
        except BaseException as error:
            first = trip.settle()
            tf.experimental.async_clear_error()  # else TensorFlow refuses all that comes after
            if mode == TRAIN:
                self.update.forget()
            if isinstance(error, StageError) and first is not None:
                raise first from error
            raise

    def _walk(self, trip):
        """Performs the actions of the schedule.

        Functions are traced one at a time, in this thread, by the first batch of its shapes.
        """
        plan, key = self.plan, (trip.mode, frozenset(map(signature, trip.slices)))
        is_new = key not in self._known
        if is_new:
            plan.place_late()
            plan.counts_are_rows = False  # unless a trace says so
        trip.counts_are_rows = self._known.get(key, False)
        tables = self.tables(len(trip.slices), trip.mode == TRAIN)
        driver.drive(tables, trip.needs, trip.perform, in_turn=is_new)
        self._known.setdefault(key, plan.counts_are_rows)

    def _tables(self, micro_batches, training):
        """For each rank its (kind, stage, micro-batch)es: the schedule with stages for chunks."""
        table = self.plan.schedule.take(micro_batches)
        ranks = table.ranks if training else table.forward_only()
        return [
            [(kind, table.stage_of(rank, chunk), m) for kind, m, chunk in actions]
            for rank, actions in enumerate(ranks)
        ]

    def _scalar(self, rank, value):
        """A float on the mesh of `rank`."""
        return self.plan.pack(tf.constant(value, denominators.wide()), rank)

    def _tell_loss(self, figures):
        compiled_loss = self.plan.model._compile_loss
        flat = compiled_loss._flat_losses if compiled_loss is not None else []
        weights = [1.0 if weight is None else weight for _, _, weight, _ in flat]
        total, losses = report.batch_loss(figures, self.plan.kinds, weights)
        told = total, losses, float(figures[:, 2].sum())
        told = tf.nest.map_structure(lambda x: tf.constant(x, denominators.wide()), told)
        return self._report(*self.plan.pack(told, self.plan.stages[-1].rank))

    def _tell(self, loss, losses, rows):
        """On the last stage: gives the loss of a batch to its trackers, and returns the logs."""
        model = self.plan.model
        model._loss_tracker.update_state(loss, sample_weight=rows)
        for metric, value in zip(model._compile_loss.metrics if losses else [], losses):
            metric.update_state(value, sample_weight=rows)
        return model.get_metrics_result()


class Trip:
    """One batch on its way.

    Args:
      trips: the `Trips`.
      slices: list of (x, y, sample_weight), host values.
      mode: TRAIN, TEST or PREDICT.

    Attributes:
      counts_are_rows: whether all losses are known to be divided by the rows.
    """

    def __init__(self, trips, slices, mode):
        self.trips, self.plan = trips, trips.plan
        self.slices, self.mode = slices, mode
        self.counts_are_rows = False
        self.rows = [float(denominators.rows_of(piece)) for piece in slices]
        self.last = self.plan.stages[-1].index
        many = len(slices)
        self.counts: list = [None] * many  # for each part its denominator
        self.divisors: list = [None] * many  # for each part what the window is divided by for it
        self.figures: list = [None] * many
        self.predicted: list = [None] * many
        self._made: dict = {}  # action: what tells whether it went well
        self._given: dict = {}  # (value, micro-batch): (tensor, mask, stages that have yet to take it)
        self._taken: dict = {}  # (stage, micro-batch): what its forward pass took and kept
        self._added: dict = {}  # (stage, micro-batch): losses that its layers add
        self._of_added: dict = {}  # (stage, micro-batch): for each part their gradients
        self._gradients: dict = {}  # (stage, micro-batch): for each part what its backward pass gave

    def needs(self, action):
        """What must have been performed before an action."""
        kind, index, m = action
        plan = self.plan
        stage = plan.stages[index]
        if kind == FORWARD:
            makers = {plan.maker[number] for number in stage.takes} - {None}
            return [(FORWARD, maker, m) for maker in makers]
        needed = [(FORWARD, index, m), (FORWARD, self.last, m)]
        consumers = {consumer for number in stage.gives for consumer in plan.consumers[number]}
        return needed + [(BACKWARD, consumer, m) for consumer in consumers]

    def perform(self, rank, action):
        """Performs an action of the table."""
        kind, index, m = action
        stage = self.plan.stages[index]
        with self._blaming(index, m, kind):
            if kind == BACKWARD:
                made = self._backward(stage, m)
            elif stage.is_last:
                made = self._last(stage, m)
            else:
                made = self._forward(stage, m)
        self._made[action] = made

    def settle(self):
        """Waits for all that was begun; returns the `StageError` of what failed by itself, if any.

        An error cancels what other stages are about to begin, and that may come out first.
        """
        first = None
        for (kind, index, m), made in list(self._made.items()):
            for tensor in tf.nest.flatten(made):
                try:
                    with self._blaming(index, m, kind):
                        to_host(tensor)
                except Exception as error:
                    if first is None and not isinstance(error.__cause__, tf.errors.CancelledError):
                        first = error
        return first

    def _blaming(self, index, micro_batch, kind):
        return Blame(self.plan.stages[index], micro_batch, kind)

    # Forward.

    def _take(self, stage, m):
        """(values, masks) that a stage takes, on its mesh."""
        values, masks, inputs = {}, {}, {}
        for number in stage.takes:
            maker = self.plan.maker[number]
            if maker is None:
                inputs[number] = self.slices[m][0][self.plan.graph.inputs.index(number)]
                continue
            tensor, mask, users = self._given[number, m]
            users.discard(stage.index)
            if not users:
                self._given.pop((number, m), None)
            values[number] = self._bring(tensor, (FORWARD, maker, m), stage.rank)
            if mask is not None:
                masks[number] = self._bring(mask, (FORWARD, maker, m), stage.rank)
        values.update(self.plan.pack(inputs, stage.rank))
        return values, masks

    def _bring(self, tensor, action, rank):
        """What an action has made, on the mesh of `rank`; it waits, so the action's errors come out."""
        kind, index, m = action
        if self.plan.stages[index].rank == rank:
            return tensor
        with self._blaming(index, m, kind):
            return hop(tensor, self.plan.meshes[rank])

    def _forward(self, stage, m):
        values, masks = self._take(stage, m)
        function = self.trips.functions[stage.index]
        residuals = None
        if self.mode == TRAIN and not self.plan.recompute:
            (given, made, kept, added, token), residuals = function.keep(values, masks)
        else:
            given, made, kept, added, token = function.forward[self.mode == TRAIN](values, masks)
        for number, tensor in given.items():
            self._given[number, m] = tensor, made.get(number), set(self.plan.consumers[number])
        self._added[stage.index, m] = added
        if self.mode == TRAIN:
            self._taken[stage.index, m] = values, masks, kept, residuals
        return token

    def _last(self, stage, m):
        values, masks = self._take(stage, m)
        function = self.trips.functions[stage.index]
        if self.mode == PREDICT:
            self.predicted[m] = function.predict(values, masks)
            return self.predicted[m]
        rows = self.trips.scalar(stage.rank, self.rows[m])
        makers = [maker for maker in range(stage.index) for _ in self._added[maker, m]]
        others = [loss for maker in range(stage.index) for loss in self._added[maker, m]]
        others = [self._bring(x, (FORWARD, k, m), stage.rank) for x, k in zip(others, makers)]
        x, y, sample_weight = self.slices[m]
        x = self.plan.graph.structured_inputs(x) if self.plan.has_own_loss else None
        x, y, sample_weight = self.plan.pack((x, y, sample_weight), stage.rank)
        if self.mode == TEST:
            self.figures[m] = function.test_last(values, masks, others, x, y, sample_weight, rows)
            return self.figures[m]
        found = function.train_last(values, masks, others, x, y, sample_weight, rows)
        self._gradients[stage.index, m], of_added, *found = found
        self.counts[m], self.divisors[m], self.figures[m] = found
        for place, maker in enumerate(makers):
            found = [gradients[place] for gradients in of_added]
            self._of_added.setdefault((maker, m), []).append(found)
        return self.figures[m]

    # Backward.

    def _backward(self, stage, m):
        if stage.is_last:
            return []  # done as one with the forward pass
        upstream: list = [{} for _ in self.counts[m]]
        for number in stage.gives:
            if not self.plan.needs_gradient[number]:
                continue
            for consumer in self.plan.consumers[number]:
                for part, found in enumerate(self._gradients[consumer, m]):
                    if number not in found:
                        continue
                    made_by = (FORWARD if consumer == self.last else BACKWARD), consumer, m
                    gradient = self._bring(found.pop(number), made_by, stage.rank)
                    upstream[part].setdefault(number, []).append(gradient)
        bring = lambda gradient: self._bring(gradient, (FORWARD, self.last, m), stage.rank)
        of_added = self._of_added.pop((stage.index, m), [])
        added = [[bring(found[part]) for found in of_added] for part in range(len(upstream))]
        values, masks, kept, residuals = self._taken.pop((stage.index, m))
        function = self.trips.functions[stage.index]
        counts = self._counts(stage.rank, m)
        if residuals is not None and len(counts) == 1 and self._is_whole(stage, upstream[0]):
            gradients, token = function.back(residuals, upstream[0], added[0], counts[0])
        else:
            gradients, token = function.backward(values, masks, kept, upstream, added, counts)
        self._gradients[stage.index, m] = gradients
        return token

    def _is_whole(self, stage, upstream):
        """Whether every stage that takes a value of `stage` has a gradient for it, where one may be."""
        needs, consumers = self.plan.needs_gradient, self.plan.consumers
        return all(
            len(upstream.get(number, ())) == len(consumers[number])
            for number in stage.gives
            if needs[number]
        )

    def _counts(self, rank, m):
        if self.counts_are_rows:
            return [self.trips.scalar(rank, self.rows[m])] * len(self.counts[m])
        return [self._bring(count, (FORWARD, self.last, m), rank) for count in self.counts[m]]

    # At the end.

    def predicted_on_host(self):
        """The outputs of each micro-batch."""
        found = []
        for m, outputs in enumerate(self.predicted):
            with self._blaming(self.last, m, FORWARD):
                found.append(tf.nest.map_structure(to_host, outputs))
        return found

    def figures_on_host(self):
        """The figures of the losses for each micro-batch; waits until all stages have ended."""
        for (kind, index, m), made in self._made.items():
            if kind == BACKWARD and tf.is_tensor(made):
                with self._blaming(index, m, BACKWARD):
                    to_host(made)
        figures = []
        for m, vector in enumerate(self.figures):
            with self._blaming(self.last, m, FORWARD):
                figures.append(to_host(vector).numpy())
        return np.asarray(figures, "float64")
