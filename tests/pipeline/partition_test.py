"""Partitions beside brute force over all cuts."""

import itertools
import time

import numpy as np
import pytest

from tfpar.pipeline.partition import partition


def cuts(count, stages):
    """All cuts of `count` calls into consecutive stages."""
    for middle in itertools.combinations(range(1, count), stages - 1):
        yield list(zip((0, *middle), (*middle, count)))


def allowed(cut, memory, bound, together):
    bounds = np.broadcast_to(bound, len(cut))
    for (start, stop), most in zip(cut, bounds):
        if sum(memory[start:stop]) > most:
            return False
    return not any(first < start <= last for start, _ in cut for first, last in together)


def slowest(cut, costs):
    return max(sum(costs[start:stop]) for start, stop in cut)


def sent(cut, crossing):
    return sum(crossing[start] for start, _ in cut[1:])


def pairs(random, count):
    """Some pairs of calls, which may overlap."""
    return [
        tuple(sorted(int(x) for x in random.integers(0, count, 2)))
        for _ in range(random.integers(0, 3))
    ]


@pytest.mark.parametrize("seed", range(300))
def test_no_cut_is_better(seed):
    """Whole numbers, so that there are ties and no rounding."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 10))
    stages = int(random.integers(1, count + 1))
    costs, memory, crossing = random.integers(0, 8, (3, count)).tolist()
    together = pairs(random, count) if seed % 2 else []
    slack = (0.0, 0.0, 0.25, 1.0)[seed % 4]
    bound = [
        np.inf,
        int(random.integers(1, 25)),
        random.integers(1, 25, stages).tolist(),
    ][seed % 3]
    asked = dict(memory=memory, bound=bound, crossing=crossing, together=together, slack=slack)
    possible = [c for c in cuts(count, stages) if allowed(c, memory, bound, together)]
    if not possible:
        with pytest.raises(ValueError, match="no cut into|can be cut into at most"):
            partition(costs, stages, **asked)
        return
    found = partition(costs, stages, **asked)
    assert found in possible
    best = min(slowest(c, costs) for c in possible)
    near = [c for c in possible if slowest(c, costs) <= (1 + slack) * best]
    assert found in near
    least = min(sent(c, crossing) for c in near)
    assert sent(found, crossing) == least
    as_little = [c for c in near if sent(c, crossing) == least]
    assert slowest(found, costs) == min(slowest(c, costs) for c in as_little)


@pytest.mark.parametrize("seed", range(50))
def test_no_cut_of_seconds_is_better(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 10))
    stages = int(random.integers(1, count + 1))
    costs = random.lognormal(-7, 2, count)
    best = min(slowest(c, costs) for c in cuts(count, stages))
    assert slowest(partition(costs, stages), costs) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(50))
def test_calls_may_cost_less_in_the_last_stage(seed):
    """Where stages run forward again in their backward pass, the last one does not."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 10))
    stages = int(random.integers(1, count + 1))
    costs = random.lognormal(0, 1, count)
    last = costs * random.uniform(0.3, 1.0, count)

    def value(cut):
        *early, (start, stop) = cut
        return max([last[start:stop].sum(), *(costs[a:b].sum() for a, b in early)])

    found = partition(costs, stages, last=last)
    assert value(found) == pytest.approx(min(map(value, cuts(count, stages))), rel=1e-9)


def test_by_hand():
    assert partition([1, 1, 1, 3], 2) == [(0, 3), (3, 4)]
    assert partition([4], 1) == [(0, 1)]
    assert partition(np.ones(6), np.int64(3)) == [(0, 2), (2, 4), (4, 6)]
    assert all(type(n) is int for span in partition([1, 1, 1], 2) for n in span)


def test_ties_end_with_early_cuts():
    assert partition([0, 0, 0, 0], 3) == [(0, 1), (1, 2), (2, 4)]


def test_slack_buys_less_to_send():
    """The even cut falls on the widest value; a tenth more for one stage avoids it."""
    costs, crossing = [10, 1, 9, 10], [0, 6, 9, 5]
    assert partition(costs, 2, crossing=crossing) == [(0, 2), (2, 4)]
    assert partition(costs, 2, crossing=crossing, slack=0.1) == [(0, 3), (3, 4)]


def test_slack_is_not_spent_for_nothing():
    assert partition([1, 9, 9, 1], 2, crossing=[0, 3, 3, 3], slack=1.0) == [(0, 2), (2, 4)]


def test_a_bound_for_each_stage():
    memory = [5, 5, 5, 5]
    assert partition([1] * 4, 2, memory=memory, bound=[5, 15]) == [(0, 1), (1, 4)]
    assert partition([1] * 4, 2, memory=memory, bound=[15, 5]) == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    "memory, bound, message",
    [
        ([4, 9, 4], 8, "bound=8 bytes; the least that works is 13, and call 1 alone has 9"),
        ([4, 9, 4], [8, np.inf], None),
        ([10, 10, 10], [10, 10], r"the least that works is \['20', '20'\]"),
    ],
)
def test_a_bound_that_is_too_tight(memory, bound, message):
    if message is None:
        assert partition([1, 1, 1], 2, memory=memory, bound=bound) == [(0, 1), (1, 3)]
        return
    with pytest.raises(ValueError, match=message):
        partition([1, 1, 1], 2, memory=memory, bound=bound)


@pytest.mark.parametrize("seed", range(50))
def test_the_bound_that_is_named_works(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 10))
    stages = int(random.integers(1, count + 1))
    memory = random.integers(1, 10**9, count).tolist()
    with pytest.raises(ValueError) as error:
        partition([1] * count, stages, memory=memory, bound=1e-3)
    named = int(
        str(error.value).split("least that works is ")[1].split(", and")[0].replace(",", "")
    )
    partition([1] * count, stages, memory=memory, bound=named)
    with pytest.raises(ValueError, match="no cut into"):
        partition([1] * count, stages, memory=memory, bound=named - 1)


@pytest.mark.parametrize(
    "costs, stages, given, message",
    [
        ([1, 2], 3, {}, "2 calls can be cut into at most 2 stages; received stages=3"),
        ([1, 2, 3], 2, {"together": [(0, 2)]}, r"at most 1 stages, as \[\(0, 2\)\] must stay"),
        ([1, 2], 0, {}, "positive int; received stages=0"),
        ([1, 2], 1.0, {}, "positive int; received stages=1.0"),
        ([1, 2], True, {}, "positive int; received stages=True"),
        ([], 1, {}, "costs must be numbers"),
        ([[1, 2]], 1, {}, "costs must be numbers"),
        ([1, -2], 1, {}, r"costs must be numbers .*received \[1, -2\]"),
        ([1, float("nan")], 1, {}, "costs must be numbers"),
        ([1, float("inf")], 1, {}, "costs must be numbers"),
        ([1, None], 1, {}, "costs must be numbers"),
        ([1, "a"], 1, {}, "costs must be numbers"),
        ([1, 2], 1, {"memory": [1]}, "memory must be one number for each of 2 calls"),
        ([1, 2], 1, {"crossing": [1, 2, 3]}, "crossing must be one number for each of 2 calls"),
        ([1, 2], 1, {"memory": [1, -1]}, "memory must be numbers"),
        ([1, 2], 1, {"bound": 0}, "bound must be a positive number of bytes.*received 0"),
        ([1, 2], 1, {"bound": [1, 2]}, r"one for each of 1 stages; received \[1, 2\]"),
        ([1, 2], 2, {"bound": [1, None]}, "bound must be a positive number"),
        ([1, 2], 1, {"bound": "8 GB"}, "bound must be a positive number"),
        ([1, 2], 1, {"together": [(0, 2)]}, r"calls 0 \.\. 1; received \(0, 2\)"),
        ([1, 2], 1, {"together": [(-1, 1)]}, r"received \(-1, 1\)"),
        ([1, 2], 1, {"together": [(1, 0)]}, r"received \(1, 0\)"),
        ([1, 2], 1, {"slack": -0.1}, "slack must be a number of at least 0.*received -0.1"),
        ([1, 2], 1, {"slack": float("nan")}, "slack must be"),
        ([1, 2], 1, {"slack": None}, "slack must be"),
    ],
)
def test_refused(costs, stages, given, message):
    with pytest.raises(ValueError, match=message):
        partition(costs, stages, **given)


def test_long_models():
    """2,000 calls into 32 stages take about a second."""
    random = np.random.default_rng(0)
    costs, memory, crossing = random.random((3, 2000))
    start = time.perf_counter()
    found = partition(costs, 32, memory=memory, bound=100.0, crossing=crossing, slack=0.02)
    assert time.perf_counter() - start < 20
    assert found[0][0] == 0 and found[-1][1] == 2000 and len(found) == 32
    assert max(sum(costs[a:b]) for a, b in found) < 1.05 * costs.sum() / 32
