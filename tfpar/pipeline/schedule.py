"""Pipeline schedules: which rank does what, in which order.

A schedule is data. Each *rank* (the device group of one place in the pipeline) has a list of
actions and works it in order: the forward or the backward of one micro-batch through one of its
chunks. With p ranks of v chunks, virtual stage s of p x v runs on rank s % p as chunk s // p.
"""

import collections
import dataclasses
import operator
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
WEIGHTS = "W"  # reserved: the weights' half of a backward split in two (ZB-H1, Qi et al. 2023)
KINDS = (FORWARD, BACKWARD, WEIGHTS)


class Action(NamedTuple):
    """One piece of work of a rank; in text "F3", or "F3.1" for a chunk other than 0.

    Where a table has W's, B is the half of the backward for the activations, and W that for the
    weights.
    """

    kind: str
    micro_batch: int
    chunk: int

    def __str__(self):
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The actions of every rank, checked.

    Args:
      ranks: per rank its actions in order, as `Action`s or plain tuples ("F", 0, 0).
      micro_batches: how many micro-batches a step has.
      chunks: virtual stages a rank.

    Raises:
      ValueError: see `validate`.
    """

    ranks: tuple[tuple[Action, ...], ...]
    micro_batches: int
    chunks: int = 1

    def __post_init__(self):
        object.__setattr__(self, "ranks", _actions(self.ranks))
        for name in ("micro_batches", "chunks"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        validate(self)

    @property
    def stages(self):
        """The number of ranks, p."""
        return len(self.ranks)

    @property
    def virtual_stages(self):
        """The number of parts that the model is cut into, p x chunks."""
        return self.stages * self.chunks

    def stage_of(self, rank, chunk):
        """The virtual stage that `rank` runs as its `chunk`."""
        return chunk * self.stages + rank

    @property
    def live(self):
        """Per rank, the most (micro-batch, chunk)s at once whose F is done and whose B is not.

        So many activations does a rank keep: [m] * p for GPipe, [p, p - 1, ..., 1] for 1F1B (never
        more than m).
        """
        return tuple(_most_live(actions) for actions in self.ranks)

    def take(self, micro_batches):
        """The schedule of the first `micro_batches`; the actions of the others are left out."""
        if not 1 <= _positive("micro_batches", micro_batches) <= self.micro_batches:
            raise ValueError(
                f"a schedule of {self.micro_batches} micro-batches has 1 to {self.micro_batches} "
                f"to take; received micro_batches={micro_batches!r}"
            )
        kept = [[a for a in actions if a.micro_batch < micro_batches] for actions in self.ranks]
        return Schedule(_actions(kept), micro_batches, self.chunks)

    def forward_only(self):
        """Per rank its forwards, as evaluation runs them: a tuple of tuples of `Action`s."""
        return tuple(tuple(a for a in actions if a.kind == FORWARD) for actions in self.ranks)

    def walk(self):
        """Yields (rank, action, stage, need) in an order in which one after the other can run.

        `stage` is the action's virtual stage. `need` is the (kind, micro_batch, stage) that must be
        done first besides what stands before the action on its rank; None for the forwards of
        stage 0. A deadlock ends the walk early.
        """
        done, places = set(), [0] * self.stages
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.ranks):
                while places[rank] < len(actions):
                    action = actions[places[rank]]
                    stage, need = self._need(rank, action)
                    if need is not None and need not in done:
                        break
                    yield rank, action, stage, need
                    done.add((action.kind, action.micro_batch, stage))
                    places[rank] += 1
                    moved = True

    def _need(self, rank, action):
        kind, m, chunk = action
        stage = self.stage_of(rank, chunk)
        if kind == WEIGHTS:
            return stage, (BACKWARD, m, stage)
        if kind == BACKWARD:
            last = stage == self.virtual_stages - 1
            return stage, (FORWARD, m, stage) if last else (BACKWARD, m, stage + 1)
        return stage, (FORWARD, m, stage - 1) if stage else None

    def table(self):
        """The schedule as text: a row a rank, a column a unit of time, every action one unit."""
        ends: dict = {}
        rows: list = [[] for _ in self.ranks]
        for rank, action, stage, need in self.walk():
            row = rows[rank]
            row += ["."] * (ends.get(need, 0) - len(row)) + [str(action)]
            ends[action.kind, action.micro_batch, stage] = len(row)
        width = max(len(cell) for row in rows for cell in row)
        lines = [" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
        return "\n".join(f"rank {rank}  {line}" for rank, line in enumerate(lines))


def validate(schedule):
    """Refuses a schedule that would not run, or would not compute what one device computes.

    Raises:
      ValueError: a micro-batch or chunk out of range; an F, B or (where there are any) W that is
        missing or stands twice; a B before its F or a W before its B; forwards of a virtual stage
        that are not in the order 0, 1, 2, ... of the micro-batches; ranks that wait for each other.
    """
    kinds = [
        k for k in KINDS if k != WEIGHTS or any(a.kind == k for r in schedule.ranks for a in r)
    ]
    for rank, actions in enumerate(schedule.ranks):
        places = collections.defaultdict(list)
        for place, action in enumerate(actions):
            _in_range(schedule, rank, action)
            places[action].append(place)
        for chunk in range(schedule.chunks):
            before = -1
            for m in range(schedule.micro_batches):
                here = f"rank {rank}, micro-batch {m}, chunk {chunk}"
                found = {kind: places[Action(kind, m, chunk)] for kind in kinds}
                for kind, where in found.items():
                    if len(where) != 1:
                        raise ValueError(
                            f"{here}: {kind} must stand once; found {len(where)} times"
                        )
                order = sorted(kinds, key=lambda kind: found[kind])
                if order != kinds:
                    raise ValueError(
                        f"{here}: the order must be {', '.join(kinds)}; received {', '.join(order)}"
                    )
                # Statistics such as those of BatchNormalization move with every forward.
                if found[FORWARD][0] < before:
                    raise ValueError(
                        f"{here}: F stands before the F of micro-batch {m - 1}; the forwards of a "
                        "chunk must be in the order of the micro-batches"
                    )
                before = found[FORWARD][0]
    _check_deadlock(schedule)


def _check_deadlock(schedule):
    done = collections.Counter(rank for rank, *_ in schedule.walk())
    waiting = []
    for rank, actions in enumerate(schedule.ranks):
        if done[rank] < len(actions):
            action = actions[done[rank]]
            _, (kind, m, stage) = schedule._need(rank, action)
            chunk, other = divmod(stage, schedule.stages)
            waiting.append(
                f"rank {rank} at {action.kind} of micro-batch {action.micro_batch}, chunk "
                f"{action.chunk} waits for {kind} of micro-batch {m}, chunk {chunk} on rank {other}"
            )
    if waiting:
        raise ValueError(f"this schedule never ends: {'; '.join(waiting)}")


def _in_range(schedule, rank, action):
    for name, limit in (("micro_batch", schedule.micro_batches), ("chunk", schedule.chunks)):
        value = getattr(action, name)
        if not 0 <= value < limit:
            raise ValueError(
                f"rank {rank}: {name} must lie in 0..{limit - 1}; received {tuple(action)}"
            )


def _most_live(actions):
    live = most = 0
    for action in actions:
        live += {FORWARD: 1, BACKWARD: -1, WEIGHTS: 0}[action.kind]
        most = max(most, live)
    return most


def _actions(ranks):
    """A table of any sequences as tuples of `Action`s."""
    try:
        table = [[Action(*entry) for entry in actions] for actions in ranks]
        table = [[Action(a[0], *map(operator.index, a[1:])) for a in row] for row in table]
    except TypeError:
        table = []
    unknown = [tuple(a) for row in table for a in row if a.kind not in KINDS]
    if not table or unknown:
        raise ValueError(
            "a schedule is a sequence of ranks, each a sequence of (kind, micro_batch, chunk) such "
            f"as ('F', 0, 0), of kind F, B or W; received {unknown[0] if unknown else ranks!r}"
        )
    return tuple(map(tuple, table))


def _positive(name, value):
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"{name} must be a positive int; received {name}={value!r}")
    return operator.index(value)


def gpipe(stages, micro_batches):
    """All forwards, then all backwards (Huang et al. 2019); the backwards too run 0 to m - 1.

    gpipe(3, 3):

    rank 0  F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1  .  F0 F1 F2 .  .  B0 B1 B2
    rank 2  .  .  F0 F1 F2 B0 B1 B2

    The bubble is (p - 1) / (m + p - 1); a rank keeps the activations of m micro-batches.
    """
    return _build(stages, micro_batches, 1, lambda rank: micro_batches)


def one_f_one_b(stages, micro_batches):
    """A backward as soon as there is one (PipeDream-Flush, Narayanan et al. 2021).

    one_f_one_b(3, 4):

    rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

    The bubble is GPipe's; rank r keeps the activations of p - r micro-batches.
    """
    return _build(stages, micro_batches, 1, lambda rank: stages - rank - 1)


def interleaved(stages, micro_batches, chunks=2):
    """1F1B over several chunks a rank (Narayanan et al. 2021, section 2.2; Megatron-LM).

    A rank takes `stages` micro-batches through a chunk, then through its next. interleaved(2, 4):

    rank 0  F0   F1   F0.1 F1.1 F2   B0.1 F3   B1.1 F2.1 B0   F3.1 B1   .    B2.1 .    B3.1 B2   B3
    rank 1  .    F0   F1   F0.1 B0.1 F1.1 B1.1 F2   B0   F3   B1   F2.1 B2.1 F3.1 B3.1 B2   B3

    With v chunks the bubble is (p - 1) / (v m + p - 1) where p divides m. Where it does not, this
    is the schedule of the next multiple without the micro-batches that are not there: a short last
    group in its place can deadlock. One chunk is 1F1B.
    """
    if _positive("chunks", chunks) == 1:
        return one_f_one_b(stages, micro_batches)
    warm_up = lambda rank: 2 * (stages - rank - 1) + (chunks - 1) * stages
    return _build(stages, micro_batches, chunks, warm_up)


def _build(stages, micro_batches, chunks, warm_up):
    """`warm_up(rank)` forwards, then one forward and one backward in turn, then backwards."""
    p, v = _positive("stages", stages), _positive("chunks", chunks)
    whole = -(-_positive("micro_batches", micro_batches) // p) * p
    order = [(k + m, c) for k in range(0, whole, p) for c in range(v) for m in range(p)]
    forwards = [Action(FORWARD, m, c) for m, c in order]
    backwards = [Action(BACKWARD, m, v - 1 - c) for m, c in order]
    ranks = []
    for rank in range(p):
        n = min(warm_up(rank), len(order))
        steady = [action for pair in zip(forwards[n:], backwards) for action in pair]
        ranks.append(forwards[:n] + steady + backwards[len(order) - n :])
    return Schedule(_actions(ranks), whole, v).take(micro_batches)


BUILDERS = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def resolve(schedule, stages, micro_batches, chunks=None):
    """The `Schedule` that a user means.

    Args:
      schedule: "gpipe", "1f1b" or "interleaved"; a function (stages, micro_batches) of a schedule;
        a `Schedule`; or a plain table of it, per rank a sequence of ("F", micro_batch, chunk).
      stages: the number of ranks it must have.
      micro_batches: the number of micro-batches it must have.
      chunks: virtual stages a rank; by default 2 for "interleaved", 1 for the other names, and what
        there is in a table.

    Raises:
      ValueError: an unknown name, other numbers of ranks, micro-batches or chunks than asked for,
        or a table that `validate` refuses.
    """
    want = {"stages": stages, "micro_batches": micro_batches, "chunks": chunks}
    if isinstance(schedule, str):
        if schedule not in BUILDERS:
            raise ValueError(f"schedule must be one of {list(BUILDERS)}; received {schedule!r}")
        if schedule == "interleaved":
            return interleaved(stages, micro_batches, 2 if chunks is None else chunks)
        if chunks not in (None, 1):
            raise ValueError(
                f"schedule {schedule!r} has one chunk a rank; received chunks={chunks!r}. "
                "Take 'interleaved' for more"
            )
        return BUILDERS[schedule](stages, micro_batches)
    if callable(schedule):
        schedule = schedule(stages, micro_batches)
    if not isinstance(schedule, Schedule):
        table = _actions(schedule)
        highest = max((a.chunk for actions in table for a in actions), default=0)
        schedule = Schedule(table, micro_batches, highest + 1 if chunks is None else chunks)
    for name, value in want.items():
        have = getattr(schedule, name)
        if value not in (None, have):
            raise ValueError(f"the schedule has {name}={have}; {name}={value!r} is needed")
    return schedule
