"""The plan of a pipelined model: which calls run on which stage mesh, and where its weights live."""

import contextlib
import math

import keras

from tfpar.mesh import aligned
from tfpar.pipeline import costs as costs_lib
from tfpar.pipeline import partition, simulate, timeline
from tfpar.pipeline.graph import Graph
from tfpar.pipeline.stage import Stage
from tfpar.variables import ShardedVariable, on_stage

SLACK = 0.05  # of the slowest stage, that a cut with less to send may cost
COPIES = 4  # weights, gradients and the two slots of Adam


class Plan:
    """How a model runs as a pipeline; what `model.pipeline` is.

    Attributes:
      model: the Keras model.
      strategy: the `MeshStrategy`.
      schedule: the `schedule.Schedule`.
      recompute: whether stages run forward again in their backward pass.
      graph: the `graph.Graph` of the model.
      stages: list of `stage.Stage`, the virtual stages in order.
      has_own_loss: whether the model has a compute_loss of its own.
      costs: for each call its `costs.Cost`, or None where the model was cut by hand.
      needs_gradient: for each value whether its gradient is wanted.
      maker: for each value the virtual stage that makes it; None for inputs of the model.
      consumers: for each value the virtual stages that take it.
      trips: the `trip.Trips` of the model as it is compiled now, or None before the first.
      stepped: for each stage mesh the places of the weights that were seen to have a gradient.
      kinds: of the losses that were compiled, as they were traced last: see `report.batch_loss`.
      counts_are_rows: whether all losses were divided by the rows, as they were traced last.
    """

    def __init__(self, model, strategy, schedule, stages, recompute, by_hand=None, memory=None):
        self.graph = Graph(model)
        if model.compiled:
            raise ValueError(
                f"model {model.name!r} is compiled already; call compile after tfpar.Pipeline"
            )
        _check_stock(model)
        self.model, self.strategy = model, strategy
        self.has_own_loss = type(model).compute_loss is not keras.Model.compute_loss
        self.schedule, self.recompute = schedule, recompute
        self.meshes = strategy.mesh.stages
        self.costs = None
        self.counted = stages != "measured"
        count = schedule.virtual_stages
        if by_hand is not None:
            bounds = _bounds_by_model(self.graph, by_hand, count)
        elif isinstance(stages, str):
            bounds = self._balanced(stages, count, memory)
        else:
            bounds = _bounds_by_name(self.graph, stages, count)
        self.stages = [
            Stage(self.graph, start, stop, index, index % self.ranks, index == count - 1)
            for index, (start, stop) in enumerate(bounds)
        ]
        self.maker = [self._maker(value.made_by) for value in self.graph.values]
        self.consumers: list = [[] for _ in self.graph.values]
        for stage in self.stages:
            for number in stage.takes:
                self.consumers[number].append(stage.index)
        self.kinds: list = []
        self.counts_are_rows = False
        self.forget_compiled()

    @property
    def ranks(self):
        """The number of stage meshes."""
        return len(self.meshes)

    def _maker(self, call):
        if call is None:
            return None
        return next(s.index for s in self.stages if s.span[0] <= call < s.span[1])

    def _balanced(self, how, count, memory):
        if how not in ("auto", "measured"):
            raise ValueError(
                "stages must be 'auto', 'measured' or the names of the layers at which the second, "
                f"third, ... stage begins; received {how!r}"
            )
        find = costs_lib.counted if self.counted else costs_lib.measured
        self.costs = find(self.graph)
        return partition.partition(
            [(1 + self.recompute) * cost.forward + cost.backward for cost in self.costs],
            count,
            last=[cost.forward + cost.backward for cost in self.costs],
            memory=[COPIES * cost.weights for cost in self.costs],
            bound=memory,
            crossing=costs_lib.crossing(self.graph),
            together=costs_lib.together(self.graph),
            slack=SLACK,
        )

    # Variables.

    def place(self):
        """Moves the model's variables to the stage meshes that use them."""
        ranks: dict = {}
        for stage in self.stages:
            for variable in stage.variables:
                found = ranks.setdefault(id(variable), [])
                if stage.rank not in found:
                    found.append(stage.rank)
        for variable in self.model.variables:
            if not isinstance(variable._value, ShardedVariable):
                self.strategy.place(variable, ranks.get(id(variable), [0]))
        self.strategy.check_layouts(self.model)

    def place_late(self):
        """Moves variables whose owner was not known when they were made to the stage meshes.

        Those of metrics go to the last one; those of the optimizer are copied to all.
        """
        optimizer = getattr(self.model, "optimizer", None)
        late = [(v, list(range(self.ranks))) for v in (optimizer.variables if optimizer else [])]
        late += [(v, [self.ranks - 1]) for metric in self.model.metrics for v in metric.variables]
        for variable, ranks in late:
            if not isinstance(variable._value, ShardedVariable):
                self.strategy.place(variable, ranks)

    def pack(self, values, rank):
        """Packs a nest of host values onto a stage mesh, dim 0 over `data` (see `data.pack`)."""
        with on_stage(rank):
            return self.strategy.pack(values)

    def weights_of(self, stage):
        """(trainable weights of a stage, their places among the optimizer's)."""
        place = self.model.optimizer._get_variable_index
        return stage.trainable, [place(weight) for weight in stage.trainable]

    @contextlib.contextmanager
    def variables_on(self, rank):
        """Has variables that several stages use stand for the copy on one stage mesh.

        For code that is being traced: it asks a Keras variable for the variable that holds it.
        """
        swapped = []
        optimizer = getattr(self.model, "optimizer", None)
        for variable in [*self.model.variables, *(optimizer.variables if optimizer else [])]:
            held = variable._value
            if isinstance(held, ShardedVariable) and rank in held.copies:
                variable._value = held.copies[rank]
                swapped.append((variable, held))
        try:
            yield
        finally:
            for variable, held in swapped:
                variable._value = held

    def forget_compiled(self):
        """Forgets what belongs to the model as it was compiled before; other layers may train now."""
        self.trips = None
        self.stepped: list[set] = [set() for _ in self.meshes]
        self.needs_gradient = _needing_gradient(self.graph)

    # For people.

    def simulate(self, forward=None, backward=None, hop=0.0):
        """The `simulate.Timeline` of a step, from the stages' costs.

        Args:
          forward, backward: one cost, or one for each virtual stage; by default those that the model
            was balanced by (seconds if measured, else FLOPs), or 1 and 2. With recompute the backward
            pass of all but the last stage takes a forward pass more.
          hop: what it costs to bring a value to the next stage, in the same unit.
        """
        if forward is None or backward is None:
            forward, backward = self._stage_costs()
        return simulate.simulate(self.schedule, forward, backward, hop=hop)

    def _stage_costs(self):
        if self.costs is None:
            forward, backward = [1.0] * len(self.stages), [2.0] * len(self.stages)
        else:
            parts = [[self.costs[k] for k in range(*stage.span)] for stage in self.stages]
            forward = [sum(cost.forward for cost in part) for part in parts]
            backward = [sum(cost.backward for cost in part) for part in parts]
        if self.recompute:
            backward = [b + f for f, b in zip(forward, backward)][:-1] + backward[-1:]
        return forward, backward

    def explain(self, timeline_width=100):
        """Stages, what they cost and hold, what travels between them, and the timeline; print it."""
        lines = [
            f"{self.model.name}: {len(self.graph.calls)} calls in {len(self.stages)} stages on "
            f"{self.ranks} stage meshes of data={self.meshes[0].data} x "
            f"model={self.meshes[0].model}, {self.schedule.micro_batches} micro-batches",
            "",
        ]
        lines += self._table()
        found = self.simulate()
        live = ", ".join(map(str, self.schedule.live))
        lines += [
            "",
            f"bubble {found.bubble:.1%}, micro-batches alive on each mesh at most [{live}]"
            + (" (their inputs only: recompute)" if self.recompute else ""),
            "",
            timeline.text(found, timeline_width),
        ]
        return "\n".join(lines)

    def _table(self):
        forward, backward = self._stage_costs()
        total = [f + b for f, b in zip(forward, backward)]
        rows = [("stage", "mesh", "calls", "cost", "parameters", "sends a row", "first", "last")]
        for stage, cost in zip(self.stages, total):
            given = [] if stage.is_last else [self.graph.values[number] for number in stage.gives]
            sent = sum(map(costs_lib.bytes_a_row, given))
            rows.append(
                (
                    str(stage.index),
                    str(stage.rank),
                    str(len(stage.calls)),
                    f"{cost / max(total):.0%}",
                    f"{sum(math.prod(v.shape) for v in stage.layer.weights):,}",
                    f"{sent:,} B",
                    stage.names[0],
                    stage.names[-1],
                )
            )
        unit = "as given" if self.costs is None else "FLOPs" if self.counted else "measured time"
        return [*aligned(rows), "", f"cost: {unit}, forward and backward, of the slowest stage's"]

    def save_timeline(self, path, title=""):
        """Draws the timeline of a step as a picture, .svg or .png (see `timeline.save`)."""
        timeline.save(self.simulate(), path, title or self.model.name)


def _needing_gradient(graph):
    """For each value of a graph whether a trainable weight lies before it, and it is no integer."""
    needs = [False] * len(graph.values)
    for call in graph.calls:
        trains = any(variable.trainable for variable in call.variables)
        if trains or any(needs[number] for number in call.takes.values()):
            for number in call.gives:
                needs[number] = "float" in graph.values[number].dtype
    return needs


def _bounds_by_name(graph, names, count):
    """Where stages begin that start at the layers `names`."""
    if not isinstance(names, (list, tuple)) or len(names) != count - 1:
        raise ValueError(
            f"{count} stages need the names of {count - 1} layers at which the others begin; "
            f"received {names!r}"
        )
    known: dict = {}
    for place, call in enumerate(graph.calls):
        known.setdefault(call.name, place)
        known.setdefault(call.name.rsplit("/", 1)[-1], place)
    starts = [0]
    for name in names:
        if name not in known:
            raise ValueError(
                f"no layer {name!r} in model {graph.model.name!r}; it has "
                f"{[call.name for call in graph.calls]}"
            )
        if known[name] <= starts[-1]:
            raise ValueError(
                f"layer {name!r} does not come after the stage before it has begun; received "
                f"{list(names)}, in the model's order {[call.name for call in graph.calls]}"
            )
        starts.append(known[name])
    return list(zip(starts, [*starts[1:], len(graph.calls)]))


def _bounds_by_model(graph, models, count):
    """The spans of the calls of each of a list of stage models."""
    if len(models) != count:
        raise ValueError(f"{count} stages need {count} stage models; received {len(models)}")
    spans, start = [], 0
    for model in models:
        stop = start
        while stop < len(graph.calls) and (
            graph.calls[stop].name == model.name
            or graph.calls[stop].name.startswith((f"{model.name}/", f"{model.name}#"))
        ):
            stop += 1
        if stop == start:
            raise ValueError(
                f"stage model {model.name!r} makes no call of its own; give every stage a name of "
                f"its own and at least one layer: {[model.name for model in models]}"
            )
        spans.append((start, stop))
        start = stop
    return spans


def _check_stock(model):
    """Refuses what a model does in a way of its own that a pipeline would not."""
    for name in ("train_step", "test_step", "predict_step", "compute_metrics"):
        stock = getattr(keras.Model, name)
        if getattr(type(model), name) is not stock:
            raise ValueError(
                f"{type(model).__name__}.{name} is the model's own; a pipeline runs the stages in "
                f"its own way and would not call it. Leave out {name}, or train with pipe=1"
            )
