"""Which consecutive calls make a stage: the cut whose slowest stage is fastest.

One slow stage holds up all others, at every micro-batch; balance matters more than the choice of
schedule.
"""

import math

import numpy as np

from tfpar.mesh import check_positive


def partition(costs, stages, *, memory=None, bound=None, crossing=None, together=(), slack=0.0):
    """Cuts a row of calls into consecutive stages so that the slowest stage is as fast as can be.

    Exact, by dynamic programming over the calls and stages: O(stages x calls^2).

    Args:
      costs: the cost of each call, in any unit.
      stages: how many stages, each of at least one call.
      memory: bytes of each call.
      bound: the most bytes that a stage may hold: a number, or one for each stage.
      crossing: for each call the bytes that would travel if a stage began there.
      together: pairs (first, last) of calls that must lie in one stage, and all between them.
      slack: by how much of the best the slowest stage may be slower, if less travels then.

    Returns:
      A list of (start, stop), one for each stage: its calls are start .. stop - 1.

    Raises:
      ValueError: fewer calls than stages, costs that are no numbers of at least 0, or a bound that no
        cut keeps.
    """
    costs = _numbers("costs", costs)
    count = len(costs)
    memory = np.zeros(count) if memory is None else _numbers("memory", memory, count)
    crossing = np.zeros(count) if crossing is None else _numbers("crossing", crossing, count)
    bounds = _bounds(bound, stages)
    may_begin = np.full(count, True)
    for first, last in together:
        may_begin[first + 1 : last + 1] = False
    if may_begin.sum() < stages:
        kept = "" if not len(together) else f", as {sorted(together)} must stay together"
        raise ValueError(
            f"{count} calls can be cut into at most {int(may_begin.sum())} stages{kept}; received "
            f"stages={stages}"
        )
    cost, held = (np.concatenate([[0.0], np.cumsum(x)]) for x in (costs, memory))

    def stage(k, stop):
        """For each start, the cost of calls start .. stop - 1 as stage k; inf if not allowed."""
        spans = cost[stop] - cost[:stop]
        fits = held[stop] - held[:stop] <= bounds[k] * (1 + 1e-12)
        return np.where(fits & may_begin[:stop], spans, math.inf)

    slowest, cuts = _best(stage, count, stages, np.maximum)
    if math.isinf(slowest):
        raise ValueError(_too_tight(held, bounds, may_begin, stages))
    limit = slowest * (1 + slack) + 1e-12 * cost[-1]

    def travelling(k, stop):
        sent = crossing[:stop] if k else np.zeros(stop)
        return np.where(stage(k, stop) <= limit, sent, math.inf)

    _, cuts = _best(travelling, count, stages, np.add)
    return list(zip(cuts, [*cuts[1:], count]))


def _best(stage, count, stages, combine):
    """The least combined value of `stages` stages over `count` calls, and where they begin."""
    best = np.full((stages + 1, count + 1), math.inf)
    begins = np.zeros((stages + 1, count + 1), int)
    best[0, 0] = 0.0
    for k in range(stages):
        for stop in range(k + 1, count + 1 - (stages - 1 - k)):
            found = combine(best[k, :stop], stage(k, stop))
            begins[k + 1, stop] = start = int(np.argmin(found))
            best[k + 1, stop] = found[start]
    cuts, stop = [], count
    for k in range(stages, 0, -1):
        stop = int(begins[k, stop])
        cuts.append(stop)
    return best[stages, count], cuts[::-1]


def _numbers(name, values, count=None):
    found = np.asarray(values, float)
    if found.ndim != 1 or not found.size or not np.all(np.isfinite(found)) or (found < 0).any():
        raise ValueError(f"{name} must be numbers of at least 0; received {values!r}")
    if count is not None and len(found) != count:
        raise ValueError(
            f"{name} must have one number for each of {count} calls; received {values!r}"
        )
    return found


def _bounds(bound, stages):
    check_positive(stages=stages)
    bounds = np.broadcast_to(math.inf if bound is None else np.asarray(bound, float), (stages,))
    if not (bounds > 0).all():
        raise ValueError(f"the bound must be a positive number of bytes; received {bound!r}")
    return bounds


def _too_tight(held, bounds, may_begin, stages):
    """The message for a bound that no cut keeps: says which one some cut would."""
    least, _ = _best(
        lambda k, stop: np.where(may_begin[:stop], held[stop] - held[:stop], math.inf),
        len(held) - 1,
        stages,
        np.maximum,
    )
    return (
        f"no cut into {stages} stages keeps each within {bounds.tolist()} bytes: the best needs "
        f"{least:,.0f} bytes in its fullest stage. Take more stages, split weights over `model`, or "
        "raise the bound"
    )
