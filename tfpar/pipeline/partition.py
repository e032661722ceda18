"""Which consecutive calls make a stage: the cut whose slowest stage is fastest.

One slow stage holds up all others, at every micro-batch; balance matters more than the choice of
schedule.
"""

import math

import numpy as np

ROUNDING = 1e-12  # of the sum over all calls: sums that differ by less are equal


def partition(
    costs, stages, *, last=None, memory=None, bound=None, crossing=None, together=(), slack=0.0
):
    """Cuts a row of calls into consecutive stages so that the slowest stage is as fast as can be.

    Exact, by dynamic programming over the calls: O(stages x calls^2). Of cuts that are as good, the
    last stage begins as early as can be, then the one before it, and so on.

    Args:
      costs: the cost of each call, in any unit.
      stages: how many stages, each of at least one call.
      last: the cost of each call in the last stage, if it is another there.
      memory: bytes of each call.
      bound: the most bytes that a stage may hold: a number, or one for each stage.
      crossing: for each call the bytes that would travel if a stage began there.
      together: pairs (first, last) of calls that must lie in one stage, and all between them.
      slack: by how much of the best the slowest stage may be slower, if less travels then: 0.02 for
        2%. Of cuts that send as little, the one whose slowest stage is fastest is taken.

    Returns:
      A list of (start, stop), one for each stage: its calls are start .. stop - 1.

    Raises:
      ValueError: fewer calls than stages, costs that are no numbers of at least 0, calls that do not
        exist, or a bound that no cut keeps.
    """
    costs = _numbers("costs", costs)
    count = len(costs)
    memory = np.zeros(count) if memory is None else _numbers("memory", memory, count)
    crossing = np.zeros(count) if crossing is None else _numbers("crossing", crossing, count)
    if not isinstance(slack, (int, float, np.number)) or not 0 <= slack < math.inf:
        raise ValueError(f"slack must be a number of at least 0, 0.02 for 2%; received {slack!r}")
    may_begin = _beginnings(together, count, stages)
    bounds = _bounds(bound, stages)
    last = costs if last is None else _numbers("last", last, count)
    spent, of_last, held = (np.concatenate([[0.0], np.cumsum(x)]) for x in (costs, last, memory))

    def spans(limit, stop):
        """The cost of calls start .. stop - 1 as stage k, [k, start]; inf where it may not be."""
        cost, bytes_ = spent[stop] - spent[:stop], held[stop] - held[:stop]
        cost = np.vstack([np.tile(cost, (stages - 1, 1)), of_last[stop] - of_last[:stop]])
        fits = bytes_ <= bounds[:, None] + ROUNDING * held[-1]
        return np.where(fits & may_begin[:stop] & (cost <= limit), cost, math.inf)

    slowest, _ = _best(lambda stop: spans(math.inf, stop), np.zeros(count), stages)
    if math.isinf(slowest):
        raise ValueError(_too_tight(memory, held, bound, bounds, may_begin))
    limit = slowest * (1 + slack) + ROUNDING * spent[-1]
    _, starts = _best(lambda stop: spans(limit, stop), crossing, stages)
    return list(zip(starts, [*starts[1:], count]))


def _best(spans, crossing, stages):
    """Of all cuts those that send least; of these the one whose largest stage is smallest.

    What precedes a stage can be chosen without regard to what follows: sums and maxima only grow
    with their parts.

    Args:
      spans: function of a stop to the sizes [k, start] of stage k over calls start .. stop - 1.
      crossing: what is sent if a stage begins with a call.

    Returns:
      (the size of the largest stage, inf if there is no cut; the first call of each stage).
    """
    count = len(crossing)
    largest = np.full((stages + 1, count + 1), math.inf)  # of k stages over the calls before stop
    sent = np.full((stages + 1, count + 1), math.inf)
    begins = np.zeros((stages + 1, count + 1), int)
    largest[0, 0] = sent[0, 0] = 0.0
    crossing = np.concatenate([[0.0], crossing[1:]])  # nothing travels to the first stage
    for stop in range(1, count + 1):
        size = np.maximum(largest[:-1, :stop], spans(stop))
        total = np.where(size < math.inf, sent[:-1, :stop] + crossing[:stop], math.inf)
        least = total.min(axis=1)
        size = np.where(total <= least[:, None], size, math.inf)
        begins[1:, stop] = size.argmin(axis=1)
        largest[1:, stop] = size.min(axis=1)
        sent[1:, stop] = least
    starts, stop = [], count
    for k in range(stages, 0, -1):
        stop = int(begins[k, stop])
        starts.append(stop)
    return float(largest[stages, count]), starts[::-1]


def _numbers(name, values, count=None):
    try:
        found = np.asarray(values, float)
    except (TypeError, ValueError):
        found = np.array(math.nan)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"{name} must be numbers of at least 0, one a call; received {values!r}")
    if count is not None and len(found) != count:
        raise ValueError(
            f"{name} must be one number for each of {count} calls; received {len(found)}: {values!r}"
        )
    return found


def _beginnings(together, count, stages):
    """For each call whether a stage may begin with it."""
    if not isinstance(stages, (int, np.integer)) or isinstance(stages, bool) or stages < 1:
        raise ValueError(f"stages must be a positive int; received stages={stages!r}")
    may_begin = np.full(count, True)
    for first, last in together:
        if not 0 <= first <= last < count:
            raise ValueError(
                f"together must be pairs (first, last) of calls 0 .. {count - 1}; received "
                f"{(first, last)}"
            )
        may_begin[first + 1 : last + 1] = False
    most = int(may_begin.sum())
    if most < stages:
        kept = f", as {sorted(together)} must stay together" if most < count else ""
        raise ValueError(
            f"{count} calls can be cut into at most {most} stages{kept}; received stages={stages}"
        )
    return may_begin


def _bounds(bound, stages):
    try:
        given = np.asarray(math.inf if bound is None else bound, float)
        bounds = np.broadcast_to(given, (stages,))
    except (TypeError, ValueError):
        bounds = np.array(math.nan)
    if not (bounds > 0).all():
        raise ValueError(
            f"the bound must be a positive number of bytes, or one for each of {stages} stages; "
            f"received {bound!r}"
        )
    return bounds


def _too_tight(memory, held, bound, bounds, may_begin):
    """The message for a bound that no cut keeps: says which one some cut would."""

    def fullness(stop):
        return np.where(may_begin[:stop], (held[stop] - held[:stop]) / bounds[:, None], math.inf)

    times, _ = _best(fullness, np.zeros(len(memory)), len(bounds))
    works = [f"{b:,.0f}" for b in np.ceil(times * bounds * (1 - ROUNDING))]
    return (
        f"no cut into {len(bounds)} stages keeps each within bound={bound!r} bytes; the least that "
        f"works is {works[0] if np.ndim(bound) == 0 else works}, and call {int(memory.argmax())} "
        f"alone has {memory.max():,.0f}. Take more stages, split weights over `model`, or raise the "
        "bound"
    )
