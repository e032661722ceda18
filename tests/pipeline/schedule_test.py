"""Schedules: the papers' tables, what every builder must hold, and tables that are refused."""

import pytest

from tfpar.pipeline.schedule import (
    BACKWARD,
    BUILDERS,
    FORWARD,
    Action,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    resolve,
)

STAGES, MICRO_BATCHES = range(1, 9), range(1, 18)


def words(schedule):
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def lines(schedule):
    return [line.split() for line in schedule.table().splitlines()]


def table(*ranks):
    """["F0 B0", ...] as plain tuples; "F1.2" is chunk 2 of micro-batch 1."""
    split = lambda word: (word[0], *map(int, (word[1:] + ".0").split(".")[:2]))
    return [[split(word) for word in rank.split()] for rank in ranks]


def test_gpipe():
    assert words(gpipe(4, 4)) == ["F0 F1 F2 F3 B0 B1 B2 B3"] * 4


def test_one_f_one_b():
    assert words(one_f_one_b(4, 4)) == [
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved():
    assert words(interleaved(2, 4, 2)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ]


def test_interleaved_where_the_stages_do_not_divide_the_micro_batches():
    assert words(interleaved(2, 3, 2)) == [
        "F0 F1 F0.1 F1.1 F2 B0.1 B1.1 F2.1 B0 B1 B2.1 B2",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 B1 F2.1 B2.1 B2",
    ]


def test_one_chunk_interleaved_is_1f1b():
    assert interleaved(4, 6, 1) == one_f_one_b(4, 6)


def test_the_drawn_table():
    assert one_f_one_b(3, 4).table().splitlines() == [
        "rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        "rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3",
        "rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize(
    "build, sizes",
    [(gpipe, (3, 3)), (one_f_one_b, (3, 4)), (interleaved, (2, 4))],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_docstrings_draw_what_is_built(build, sizes):
    drawn = [line.split() for line in build.__doc__.splitlines() if " rank " in f" {line.strip()}"]
    drawn = [line for line in drawn if line[0] == "rank"]
    assert drawn == lines(build(*sizes))


@pytest.mark.parametrize("p", STAGES)
def test_every_size_of_every_builder_is_complete_and_runs(p):
    """Counted and run here by other code than `validate`'s."""
    for m in MICRO_BATCHES:
        for schedule in (
            gpipe(p, m),
            one_f_one_b(p, m),
            *(interleaved(p, m, v) for v in (2, 3, 4)),
        ):
            want = {(k, i, c) for k in "FB" for i in range(m) for c in range(schedule.chunks)}
            done, queues = set(), [list(actions) for actions in schedule.ranks]
            assert all(set(q) == want and len(q) == len(want) for q in queues)
            while any(queues):
                ready = [r for r, q in enumerate(queues) if q and can_run(q[0], r, schedule, done)]
                assert ready, f"deadlock at {p}, {m}, {schedule.chunks}"
                for rank in ready:
                    kind, i, chunk = queues[rank].pop(0)
                    done.add((kind, i, chunk * p + rank))


def can_run(action, rank, schedule, done):
    kind, i, chunk = action
    stage = chunk * schedule.stages + rank
    if kind == FORWARD:
        return stage == 0 or (FORWARD, i, stage - 1) in done
    last = stage == schedule.stages * schedule.chunks - 1
    return (FORWARD, i, stage) in done and (last or (BACKWARD, i, stage + 1) in done)


@pytest.mark.parametrize("p", STAGES)
def test_live(p):
    for m in MICRO_BATCHES:
        assert gpipe(p, m).live == (m,) * p
        assert one_f_one_b(p, m).live == tuple(min(m, p - rank) for rank in range(p))
        for v in (2, 3, 4):
            bound = [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
            live = interleaved(p, m, v).live
            assert live == tuple(bound) if m % p == 0 else all(a <= b for a, b in zip(live, bound))


@pytest.mark.parametrize("p", STAGES)
def test_take(p):
    """The schedule of fewer micro-batches; for GPipe and 1F1B what their builders would make."""
    for build in (gpipe, one_f_one_b):
        whole = build(p, 17)
        assert all(whole.take(m) == build(p, m) for m in MICRO_BATCHES)
    for v in (2, 3, 4):
        whole = interleaved(p, 17, v)
        for m in MICRO_BATCHES:
            part = whole.take(m)
            assert part.micro_batches == m and part.chunks == v
            for before, after in zip(whole.ranks, part.ranks):
                assert after == tuple(a for a in before if a.micro_batch < m)


@pytest.mark.parametrize("m", [0, 5, -1, True, 2.0, None])
def test_take_refuses(m):
    with pytest.raises(ValueError, match="micro_batches"):
        gpipe(2, 4).take(m)


def test_forward_only():
    forwards = interleaved(2, 2, 2).forward_only()
    want = tuple(Action(FORWARD, m, c) for m, c in [(0, 0), (1, 0), (0, 1), (1, 1)])
    assert forwards == (want, want)


def test_stages():
    schedule = interleaved(3, 6, 2)
    assert (schedule.stages, schedule.virtual_stages, schedule.chunks) == (3, 6, 2)
    found = [schedule.stage_of(rank, chunk) for chunk in (0, 1) for rank in (0, 1, 2)]
    assert found == [0, 1, 2, 3, 4, 5]


def test_plain_tables_are_made_actions():
    schedule = Schedule([[["F", 0, 0], ("B", 0, 0)]], 1)
    assert schedule.ranks == ((Action("F", 0, 0), Action("B", 0, 0)),)
    assert schedule == gpipe(1, 1) and hash(schedule) == hash(gpipe(1, 1))
    assert schedule.ranks[0][1].kind == BACKWARD


def test_backwards_split_in_two():
    ranks = table("F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1")
    assert Schedule(ranks, 2).live == (2, 1)
    assert lines(Schedule(ranks, 2))[0][2:] == ["F0", "F1", ".", "B0", "W0", "B1", "W1"]


BROKEN = {
    "F missing": (["F0 B0 B1"], 2, 1, "rank 0, micro-batch 1, chunk 0: F must stand once; found 0"),
    "B missing": (["F0 B0 F1"], 2, 1, "rank 0, micro-batch 1, chunk 0: B must stand once; found 0"),
    "B twice": (["F0 B0", "F0 B0 B0"], 1, 1, "rank 1, micro-batch 0, chunk 0: B .* found 2 times"),
    "W missing": (
        ["F0 B0 W0", "F0 B0"],
        1,
        1,
        "rank 1, micro-batch 0, chunk 0: W must stand once; found 0",
    ),
    "B before F": (
        ["B0 F0"],
        1,
        1,
        "rank 0, micro-batch 0, chunk 0: the order must be F, B; .* B, F",
    ),
    "W before B": (
        ["F0 W0 B0"],
        1,
        1,
        "micro-batch 0, chunk 0: the order must be F, B, W; .* F, W, B",
    ),
    "chunk missing": (
        ["F0 B0"],
        1,
        2,
        "rank 0, micro-batch 0, chunk 1: F must stand once; found 0",
    ),
    "micro-batch from 1": (["F1 B1"], 1, 1, r"rank 0: micro_batch .* 0..0; received \('F', 1, 0\)"),
    "chunk from 1": (
        ["F0.1 B0.1"],
        1,
        1,
        r"rank 0: chunk must lie in 0..0; received \('F', 0, 1\)",
    ),
    "forwards out of order": (
        ["F0 F1 F2 B0 B1 B2", "F0 F2 F1 B0 B1 B2"],
        3,
        1,
        "rank 1, micro-batch 2, chunk 0: F stands before the F of micro-batch 1",
    ),
    "backwards in opposite orders": (
        ["F0 F1 B1 B0", "F0 B0 F1 B1"],
        2,
        1,
        None,  # a delay, no deadlock
    ),
    "deadlock of two ranks": (
        ["F0 B0 F1 B1", "F0 F1 B0 B1"],
        2,
        1,
        "rank 0 at B of micro-batch 0, chunk 0 waits for B of micro-batch 0, chunk 0 on rank 1; "
        "rank 1 at F of micro-batch 1, chunk 0 waits for F of micro-batch 1, chunk 0 on rank 0",
    ),
    "deadlock of a rank with itself": (
        ["F0.1 F0 B0.1 B0"],
        1,
        2,
        "rank 0 at F of micro-batch 0, chunk 1 waits for F of micro-batch 0, chunk 0 on rank 0",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tables(name):
    ranks, micro_batches, chunks, message = BROKEN[name]
    if message is None:
        Schedule(table(*ranks), micro_batches, chunks)
        return
    with pytest.raises(ValueError, match=message):
        Schedule(table(*ranks), micro_batches, chunks)


@pytest.mark.parametrize(
    "ranks",
    [None, 3, [], "F0", [None], [[("F", 0)]], [[("F", "0", 0)]], [[("f", 0, 0)]], [[([], 0, 0)]]],
    ids=repr,
)
def test_what_is_no_table(ranks):
    with pytest.raises(ValueError, match="a schedule is a sequence of ranks.*received"):
        Schedule(ranks, 1)


@pytest.mark.parametrize("name", ["stages", "micro_batches", "chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None])
def test_sizes_must_be_positive_ints(name, value):
    sizes = {"stages": 2, "micro_batches": 4, "chunks": 2, name: value}
    with pytest.raises(ValueError, match=f"{name} must be a positive int; received {name}="):
        interleaved(**sizes)


def test_resolve_names():
    assert resolve("gpipe", 2, 4) == gpipe(2, 4) == resolve("gpipe", 2, 4, chunks=1)
    assert resolve("1f1b", 2, 4) == one_f_one_b(2, 4)
    assert resolve("interleaved", 2, 4) == interleaved(2, 4, 2)
    assert resolve("interleaved", 2, 4, chunks=3) == interleaved(2, 4, 3)
    assert set(BUILDERS) == {"gpipe", "1f1b", "interleaved"}


def test_resolve_functions_schedules_and_tables():
    plain = table("F0 F1 B0 B1")
    assert resolve(lambda p, m: plain, 1, 2) == gpipe(1, 2) == resolve(plain, 1, 2)
    assert resolve(one_f_one_b, 3, 4) == one_f_one_b(3, 4) == resolve(one_f_one_b(3, 4), 3, 4)
    chunked = [list(map(tuple, actions)) for actions in interleaved(2, 4, 3).ranks]
    assert resolve(chunked, 2, 4) == interleaved(2, 4, 3) == resolve(chunked, 2, 4, chunks=3)


@pytest.mark.parametrize(
    "schedule, chunks, message",
    [
        ("zero-bubble", None, r"one of \['gpipe', '1f1b', 'interleaved'\]; received 'zero-bubble'"),
        ("1f1b", 2, "'1f1b' has one chunk a rank; received chunks=2"),
        ("gpipe", 2, "'gpipe' has one chunk a rank; received chunks=2"),
        ("interleaved", 0, "chunks must be a positive int; received chunks=0"),
        (gpipe(3, 4), None, "has stages=3; stages=2 is needed"),
        (gpipe(2, 8), None, "has micro_batches=8; micro_batches=4 is needed"),
        (gpipe(2, 4), 2, "has chunks=1; chunks=2 is needed"),
        (lambda p, m: gpipe(p, 1), None, "has micro_batches=1; micro_batches=4 is needed"),
        (lambda p, m: None, None, "a schedule is a sequence of ranks.*received None"),
        ([[("F", 0, 0), ("B", 0, 0)]], None, "rank 0, micro-batch 1, chunk 0: F must stand once"),
    ],
)
def test_resolve_refuses(schedule, chunks, message):
    with pytest.raises(ValueError, match=message):
        resolve(schedule, 2, 4, chunks)
