"""A batch's trip through the stages of a pipelined model."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfpar.collectives import hop
from tfpar.pipeline import driver, report
from tfpar.pipeline.blame import Blame, StageError
from tfpar.pipeline.functions import Functions
from tfpar.pipeline.schedule import BACKWARD, FORWARD
from tfpar.pipeline.update import Update
from tfpar.strategy import data as data_lib
from tfpar.variables import on_stage, to_host, to_mesh

TRAIN, TEST, PREDICT = "train", "test", "predict"


class Trips:
    """Takes batches through the stages of a compiled model.

    Args:
      plan: the `plan.Plan`.
    """

    def __init__(self, plan):
        self.plan = plan
        self.functions = [Functions(stage, plan) for stage in plan.stages]
        self._update = None
        self._report = self.functions[-1].compiled(self._tell)
        self._known: dict = {}
        self._scalars: dict = {}

    @property
    def update(self):
        """The `Update` of the model's optimizer."""
        if self._update is None:
            self._update = Update(self.plan)
        return self._update

    def train(self, batch):
        """Trains on one batch of host values; returns the logs."""
        trip = self._trip(batch, TRAIN)
        with self._ending_well(trip):
            self._walk(trip)
            divisors = np.sum([[float(to_host(d)) for d in one] for one in trip.divisors], axis=0)
            figures = trip.figures_on_host()
        self.update.finish_batch(list(divisors))
        return self._tell_loss(figures)

    def test(self, batch):
        """Evaluates one batch of host values; returns the logs."""
        trip = self._trip(batch, TEST)
        with self._ending_well(trip):
            self._walk(trip)
            figures = trip.figures_on_host()
        return self._tell_loss(figures)

    def predict(self, batch):
        """The outputs for one batch of host values, on the host."""
        trip = self._trip(batch, PREDICT)
        with self._ending_well(trip):
            self._walk(trip)
            parts = trip.predicted_on_host()
        return tf.nest.map_structure(lambda *values: tf.concat(values, 0), *parts)

    def predict_all(self, batches):
        """The outputs for a list of batches, as Keras wants them."""
        outputs = [self.predict(batch) for batch in batches]
        return tf.nest.map_structure(lambda *values: tf.concat(values, 0), *outputs)

    def _trip(self, batch, mode):
        plan = self.plan
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        x = plan.graph.standardized(data_lib.to_tensors(x))
        rest = data_lib.to_tensors((y, sample_weight))
        slices = data_lib.cut((x, *rest), plan.schedule.micro_batches, plan.meshes[0].data)
        return Trip(self, slices, mode)

    def _walk(self, trip):
        """Takes a batch through the stages.

        Functions are traced one at a time, in this thread, by the first batch of its shapes.
        """
        plan, key = self.plan, (trip.mode, _signature(trip.slices))
        table = plan.schedule.take(len(trip.slices))
        ranks = table.ranks if trip.mode == TRAIN else table.forward_only()
        is_new = key not in self._known
        if is_new:
            plan.place_late()
            plan.counts_are_rows = False  # unless a trace says so
        trip.counts_are_rows = self._known.get(key, False)
        driver.drive(trip.tables(ranks), trip.needs, trip.perform, in_turn=is_new)
        self._known.setdefault(key, plan.counts_are_rows)

    @contextlib.contextmanager
    def _ending_well(self, trip):
        """Has an error leave nothing behind: no work under way, no gradients of half a batch."""
        try:
            yield
        except BaseException as error:
            first = trip.settle()
            tf.experimental.async_clear_error()  # else TensorFlow refuses all that comes after
            if trip.mode == TRAIN:
                self.update.forget()
            if isinstance(error, StageError) and first is not None:
                raise first from error
            raise

    def scalar(self, rank, value):
        """A float on the mesh of `rank`."""
        key = rank, value
        if key not in self._scalars:
            if len(self._scalars) > 1000:
                self._scalars.clear()
            dtype = self.functions[0].wide
            layout = self.plan.meshes[rank].layout(())
            self._scalars[key] = to_mesh(tf.constant(value, dtype), layout)
        return self._scalars[key]

    def _tell_loss(self, figures):
        compiled = self.plan.model._compile_loss
        weights = (
            []
            if compiled is None
            else [1.0 if w is None else w for _, _, w, _ in compiled._flat_losses]
        )
        total, losses = report.batch_loss(figures, self.plan.kinds, weights)
        rows = float(figures[:, 2].sum())
        rank = self.plan.ranks - 1
        pack = lambda value: to_mesh(
            tf.constant(value, self.functions[0].wide), self.plan.meshes[rank].layout(())
        )
        logs = self._report(pack(total), [pack(loss) for loss in losses], pack(rows))
        return tf.nest.map_structure(to_host, logs)

    def _tell(self, loss, losses, rows):
        """On the last stage: gives the loss of a batch to its trackers, and returns the logs."""
        model = self.plan.model
        model._loss_tracker.update_state(loss, sample_weight=rows)
        if losses:
            for metric, value in zip(model._compile_loss.metrics, losses):
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
        self.rows = [_rows(piece) for piece in slices]
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

    def tables(self, ranks):
        """The tables of a schedule with stages in place of chunks."""
        stage = self.plan.schedule.stage_of
        return [
            [(kind, stage(rank, chunk), m) for kind, m, chunk in actions]
            for rank, actions in enumerate(ranks)
        ]

    def needs(self, action):
        """What must have been performed before an action."""
        kind, index, m = action
        plan = self.plan
        stage = plan.stages[index]
        if kind == FORWARD:
            makers = {self._maker(number) for number in stage.takes} - {None}
            return [(FORWARD, maker, m) for maker in makers]
        needed = [(FORWARD, index, m), (FORWARD, len(plan.stages) - 1, m)]
        consumers = {index for number in stage.gives for index in plan.consumers(number)}
        return needed + [(BACKWARD, consumer, m) for consumer in consumers]

    def _maker(self, number):
        """The stage that makes a value; None for an input of the model."""
        return self.plan.maker[number]

    def perform(self, rank, action):
        """Performs an action of the table."""
        kind, index, m = action
        stage = self.plan.stages[index]
        with self._blaming(index, m, kind):
            if kind == BACKWARD:
                made = self._backward(stage, m)
            elif index == len(self.plan.stages) - 1:
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
            maker = self._maker(number)
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
        values.update(self._pack(inputs, stage.rank))
        return values, masks

    def _pack(self, values, rank):
        with on_stage(rank):
            return self.plan.strategy.pack(values)

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
            users = set(self.plan.consumers(number))
            self._given[number, m] = tensor, made.get(number), users
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
        rows = self.trips.scalar(stage.rank, float(self.rows[m]))
        makers = [maker for maker in range(stage.index) for _ in self._added[maker, m]]
        others = [loss for maker in range(stage.index) for loss in self._added[maker, m]]
        others = [self._bring(x, (FORWARD, k, m), stage.rank) for x, k in zip(others, makers)]
        x, y, sample_weight = self.slices[m]
        x = self.plan.graph.structured_inputs(x) if self.plan.has_own_loss else None
        x, y, sample_weight = self._pack((x, y, sample_weight), stage.rank)
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
        last = len(self.plan.stages) - 1
        if stage.index == last:
            return []  # done as one with the forward pass
        upstream: list = [{} for _ in self.counts[m]]
        for number in stage.gives:
            if not self.plan.needs_gradient[number]:
                continue
            for consumer in self.plan.consumers(number):
                for part, found in enumerate(self._gradients[consumer, m]):
                    if number not in found:
                        continue
                    made_by = (FORWARD if consumer == last else BACKWARD), consumer, m
                    gradient = self._bring(found.pop(number), made_by, stage.rank)
                    upstream[part].setdefault(number, []).append(gradient)
        bring = lambda gradient: self._bring(gradient, (FORWARD, last, m), stage.rank)
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
            len(upstream.get(number, ())) == len(consumers(number))
            for number in stage.gives
            if needs[number]
        )

    def _counts(self, rank, m):
        if self.counts_are_rows:
            return [self.trips.scalar(rank, float(self.rows[m]))] * len(self.counts[m])
        last = len(self.plan.stages) - 1
        return [self._bring(count, (FORWARD, last, m), rank) for count in self.counts[m]]

    # At the end.

    def predicted_on_host(self):
        """The outputs of each micro-batch."""
        found = []
        for m, outputs in enumerate(self.predicted):
            with self._blaming(len(self.plan.stages) - 1, m, FORWARD):
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
            with self._blaming(len(self.plan.stages) - 1, m, FORWARD):
                figures.append(to_host(vector).numpy())
        return np.asarray(figures, "float64")


def _rows(piece):
    return next(len(value) for value in tf.nest.flatten(piece) if np.ndim(value))


def _signature(slices):
    """The shapes and dtypes of a batch's slices, those that are there."""
    one = lambda value: (tuple(np.shape(value)), str(getattr(value, "dtype", type(value))))
    return frozenset(tuple(map(one, tf.nest.flatten(piece))) for piece in slices)
