"""Simulated schedules: bubbles by the papers' formulas, and small timelines counted by hand."""

import pytest

from tfpar.pipeline.schedule import Schedule, gpipe, interleaved, one_f_one_b
from tfpar.pipeline.simulate import Event, Timeline, simulate

COSTS = [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (0.3, 0.7)]


def times(timeline):
    """{(rank, "F0"): (start, end)}"""
    return {(e.rank, str(e.action)): (e.start, e.end) for e in timeline.events}


@pytest.mark.parametrize("forward, backward", COSTS)
@pytest.mark.parametrize("p", range(1, 9))
def test_bubbles(p, forward, backward):
    """(p - 1) / (m + p - 1) for GPipe and 1F1B, (p - 1) / (v m + p - 1) interleaved."""
    for m in range(1, 18):
        want = (p - 1) / (m + p - 1)
        for build in (gpipe, one_f_one_b):
            assert simulate(build(p, m), forward, backward).bubble == pytest.approx(want)
        for v in range(1, 5) if m % p == 0 else ():
            want = (p - 1) / (v * m + p - 1)
            found = simulate(interleaved(p, m, v), forward, backward).bubble
            assert found == pytest.approx(want), (m, v)


@pytest.mark.parametrize("p", range(2, 9))
def test_interleaving_does_not_lengthen_any_number_of_micro_batches(p):
    """The same model cut finer: each of v chunks costs 1 / v. Never slower than the 1F1B of it."""
    for m in range(1, 18):
        plain = simulate(one_f_one_b(p, m), 1, 2).makespan
        for v in (2, 3, 4):
            assert simulate(interleaved(p, m, v), 1 / v, 2 / v).makespan <= plain + 1e-9, (m, v)


@pytest.mark.parametrize("p, published", [(2, 1.94), (4, 3.66), (8, 6.56)])
def test_gpipes_ideal_speedups(p, published):
    """32 micro-batches."""
    found = simulate(gpipe(p, 32)).speedup
    assert found == pytest.approx(p * 32 / (32 + p - 1))
    assert found == pytest.approx(published, abs=0.006)


def test_two_stages_by_hand():
    """Unequal stages and a hop: 1F1B of two micro-batches."""
    timeline = simulate(one_f_one_b(2, 2), forward=[1, 2], backward=[3, 4], hop=0.5)
    assert times(timeline) == {
        (0, "F0"): (0, 1),
        (0, "F1"): (1, 2),
        (1, "F0"): (1.5, 3.5),
        (1, "B0"): (3.5, 7.5),
        (1, "F1"): (7.5, 9.5),
        (1, "B1"): (9.5, 13.5),
        (0, "B0"): (8, 11),
        (0, "B1"): (14, 17),
    }
    assert timeline.makespan == 17
    assert timeline.busy == (8, 12)
    assert timeline.speedup == pytest.approx(20 / 17)
    assert timeline.bubble == pytest.approx(1 - 20 / 34)


def test_a_virtual_stage_of_its_own_cost():
    """One rank of three chunks: all in a row, and no hop between chunks of the same rank."""
    timeline = simulate(interleaved(1, 1, 3), forward=[1, 2, 3], backward=[4, 5, 6], hop=100)
    assert times(timeline) == {
        (0, "F0"): (0, 1),
        (0, "F0.1"): (1, 3),
        (0, "F0.2"): (3, 6),
        (0, "B0.2"): (6, 12),
        (0, "B0.1"): (12, 17),
        (0, "B0"): (17, 21),
    }
    assert [e.stage for e in timeline.events] == [0, 1, 2, 2, 1, 0]
    assert timeline.bubble == 0


def test_hops_around_the_ranks():
    """Between the last rank and the first of the next chunk there is a hop too."""
    timeline = simulate(interleaved(2, 1, 2), 1, 1, hop=10)
    assert times(timeline)[0, "F0.1"] == (22, 23)
    assert timeline.makespan == 8 + 6 * 10


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
def test_one_slow_stage(build):
    """4 stages, 16 micro-batches, one stage 1.5x slower: the bubble doubles.

    GPipe: each of the two passes takes (m - 1) x 1.5 + 4.5 = 27 of its units, of which the ranks
    work 4.5 x 16 / 4 = 18; 15.8 % of idle time become a third.
    """
    slow = [1, 1.5, 1, 1]
    even = simulate(build(4, 16)).bubble
    timeline = simulate(build(4, 16), slow, [2 * c for c in slow])
    assert even == pytest.approx(3 / 19)
    assert 1.9 < timeline.bubble / even < 2.2
    if build is gpipe:
        assert timeline.bubble == pytest.approx(1 / 3)


def test_backwards_split_in_two():
    """W runs where a rank would wait: the two halves of 2 cost less time than the whole does."""
    kinds = lambda words: [(word[0], int(word[1]), 0) for word in words.split()]
    split = Schedule([kinds("F0 F1 B0 W0 B1 W1"), kinds("F0 B0 F1 B1 W0 W1")], 2)
    timeline = simulate(split, forward=1, backward=1, weights=1)
    assert times(timeline)[0, "B0"] == (3, 4)
    assert times(timeline)[1, "W1"] == (6, 7)
    assert timeline.makespan == 7 < simulate(one_f_one_b(2, 2), 1, 2).makespan == 9


def test_weights_are_ignored_without_w():
    assert simulate(gpipe(2, 4), weights=7) == simulate(gpipe(2, 4))


@pytest.mark.parametrize("schedule", [gpipe(3, 5), one_f_one_b(3, 5), interleaved(3, 5, 2)])
def test_no_rank_does_two_things_at_once(schedule):
    n = schedule.virtual_stages
    timeline = simulate(
        schedule, [1 + s / 7 for s in range(n)], [3 - s / 5 for s in range(n)], hop=0.3
    )
    for rank, actions in enumerate(schedule.ranks):
        mine = [e for e in timeline.events if e.rank == rank]
        assert tuple(e.action for e in mine) == actions
        assert all(a.end <= b.start for a, b in zip(mine, mine[1:]))


def test_costs_of_nothing():
    timeline = simulate(gpipe(2, 2), 0, 0)
    assert (timeline.makespan, timeline.bubble) == (0, 0)


def test_a_measured_timeline():
    action = gpipe(1, 1).ranks[0][0]
    timeline = Timeline((Event(0, action, 0, 0.0, 3.0), Event(1, action, 1, 3.0, 4.0)), 2)
    assert (timeline.makespan, timeline.busy, timeline.bubble) == (4.0, (3.0, 1.0), 0.5)


@pytest.mark.parametrize(
    "costs, message",
    [
        (
            {"forward": [1, 2, 3]},
            r"forward must be one number, or one per virtual stage \(2\); rec",
        ),
        ({"backward": -1}, "backward must be seconds >= 0; received -1"),
        ({"weights": [1, float("nan")]}, "weights must be seconds >= 0; received nan"),
        ({"hop": float("inf")}, "hop must be seconds >= 0; received inf"),
        ({"forward": None}, "forward must be seconds >= 0; received None"),
        ({"forward": "ab"}, "forward must be seconds >= 0; received 'a'"),
    ],
)
def test_refused_costs(costs, message):
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, 2), **costs)
