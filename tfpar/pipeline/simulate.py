"""How long a schedule takes: an exact simulation, given what each stage costs."""

import collections.abc
import dataclasses
import math
import numbers
from typing import NamedTuple

from tfpar.pipeline.schedule import BACKWARD, FORWARD, WEIGHTS, Action


class Event(NamedTuple):
    """An action of a rank on its virtual stage, from `start` to `end` in seconds."""

    rank: int
    action: Action
    stage: int
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """When which rank did what, simulated or measured, in seconds from the start of the step.

    Args:
      events: `Event`s; those of one rank do not overlap.
      ranks: how many ranks there are.
    """

    events: tuple[Event, ...]
    ranks: int

    @property
    def makespan(self):
        """Seconds until the last event has ended."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def busy(self):
        """Per rank, the seconds that it works."""
        return tuple(
            math.fsum(e.end - e.start for e in self.events if e.rank == rank)
            for rank in range(self.ranks)
        )

    @property
    def speedup(self):
        """How many times faster than one rank that does all the work: sum(busy) / makespan."""
        return math.fsum(self.busy) / self.makespan if self.makespan else float(self.ranks)

    @property
    def bubble(self):
        """The part of the ranks' time that is idle: 1 - sum(busy) / (ranks * makespan)."""
        return 1 - self.speedup / self.ranks


def simulate(schedule, forward=1.0, backward=2.0, weights=0.0, hop=0.0):
    """The timeline of a schedule.

    A rank works its actions in order. Each starts as soon as the rank is free and what it depends
    on is there.

    Args:
      schedule: a `Schedule`.
      forward, backward, weights: seconds that a micro-batch takes; one number, or one per virtual
        stage. Where the schedule has W's, `backward` is the half for the activations and `weights`
        the other; where it has none, `weights` is ignored.
      hop: seconds from a virtual stage to the next, during which both ranks may work; 0 between two
        on the same rank.

    Returns:
      A `Timeline`, its events in an order that respects what they depend on.

    Raises:
      ValueError: a cost that is no finite number >= 0, or not one per virtual stage.
    """
    n = schedule.virtual_stages
    costs = {
        FORWARD: _per_stage("forward", forward, n),
        BACKWARD: _per_stage("backward", backward, n),
        WEIGHTS: _per_stage("weights", weights, n),
    }
    (hop,) = _per_stage("hop", hop, 1)
    free = [0.0] * schedule.stages
    ends: dict[tuple, float] = {}
    events = []
    for rank, action, stage, need in schedule.walk():
        start = free[rank]
        if need is not None:
            elsewhere = need[2] % schedule.stages != rank
            start = max(start, ends[need] + (hop if elsewhere else 0.0))
        end = start + costs[action.kind][stage]
        free[rank] = ends[action.kind, action.micro_batch, stage] = end
        events.append(Event(rank, action, stage, start, end))
    return Timeline(tuple(events), schedule.stages)


def _per_stage(name, cost, n):
    """A list of `n` costs."""
    costs = list(cost) if isinstance(cost, collections.abc.Iterable) else [cost] * n
    if len(costs) != n:
        raise ValueError(
            f"{name} must be one number, or one per virtual stage ({n}); received {len(costs)}: "
            f"{costs}"
        )
    for value in costs:
        if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
            raise ValueError(f"{name} must be seconds >= 0; received {value!r}")
    return [float(value) for value in costs]
