"""The driver: order, errors, interrupts, and the bubble that a schedule really makes."""

import os
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_test import mesh, scope

import tfpar
from tfpar.pipeline import driver, schedule
from tfpar.pipeline.simulate import Event, Timeline, simulate
from tfpar.variables import in_step

L = keras.layers


def keyed(table):
    """The tables of a schedule in the driver's terms, and what each action needs."""
    last = table.virtual_stages - 1
    tables = [
        [(kind, table.stage_of(rank, chunk), m) for kind, m, chunk in actions]
        for rank, actions in enumerate(table.ranks)
    ]

    def needs(action):
        kind, stage, m = action
        if kind == "F":
            return [("F", stage - 1, m)] if stage else []
        return [("F", stage, m)] + ([("B", stage + 1, m)] if stage < last else [])

    return tables, needs


def executed(table, forward, backward):
    """The `Timeline` of a walk whose stages call a function on a device of their own, and sleep.

    They sleep outside the function: TensorFlow runs no more Python at once than it has threads.
    """

    def on(device):
        with tf.device(device):
            return tf.function(tf.identity)

    stages = [on(f"CPU:{rank}") for rank in range(table.stages)]
    seconds = {"F": forward, "B": backward}
    for stage in stages:
        stage(tf.zeros(()))
    events, start = [], time.perf_counter()

    def perform(rank, action):
        begun = time.perf_counter()
        kind, stage, m = action
        stages[rank](tf.zeros(()))
        time.sleep(seconds[kind])
        done = schedule.Action(kind, m, stage // table.stages)
        events.append(Event(rank, done, stage, begun - start, time.perf_counter() - start))

    driver.drive(*keyed(table), perform)
    return Timeline(tuple(events), table.stages)


@pytest.mark.parametrize("micro_batches", [8, 16])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_bubble_is_the_simulators(name, micro_batches):
    """Stages of fixed sleeps on four devices: the walk takes what the simulator says.

    The least of some walks: a busy machine can only make a bubble larger.
    """
    table = schedule.resolve(name, 4, micro_batches)
    forward, backward = 0.03, 0.06
    expected = simulate(table, forward, backward).bubble
    formula = 3 / (table.chunks * micro_batches + 3)
    assert expected == pytest.approx(formula)
    found = 1.0
    for _ in range(5):
        found = min(found, executed(table, forward, backward).bubble)
        if found == pytest.approx(expected, rel=0.15):
            return
    pytest.fail(f"bubble {found:.3f}, simulated {expected:.3f}")


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_every_action_once_after_its_needs(name, in_turn):
    table = schedule.resolve(name, 3, 7)
    tables, needs = keyed(table)
    done, lock = [], threading.Lock()

    def perform(rank, action):
        with lock:
            assert all(need in done for need in needs(action))
            assert [a for a in done if a in tables[rank]] == tables[rank][
                : tables[rank].index(action)
            ]
            done.append(action)

    driver.drive(tables, needs, perform, in_turn=in_turn)
    assert sorted(done) == sorted(action for actions in tables for action in actions)


def test_live_micro_batches_are_those_of_the_schedule():
    """What a walk keeps between forward and backward: [4, 4, 4, 4] and [4, 3, 2, 1]."""
    for name, expected in (("gpipe", [4, 4, 4, 4]), ("1f1b", [4, 3, 2, 1])):
        table = schedule.resolve(name, 4, 4)
        live, most = [0] * 4, [0] * 4

        def perform(rank, action):
            live[rank] += 1 if action[0] == "F" else -1
            most[rank] = max(most[rank], live[rank])

        driver.drive(*keyed(table), perform)
        assert most == expected == list(table.live)


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_first_error_ends_the_walk(in_turn):
    tables, needs = keyed(schedule.gpipe(4, 8))
    after = []

    def perform(rank, action):
        if action == ("F", 2, 3):
            raise ZeroDivisionError("here")
        after.append(action)

    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="here"):
        driver.drive(tables, needs, perform, in_turn=in_turn)
    assert threading.active_count() == before
    assert not any(kind == "B" for kind, _, _ in after)


def test_an_interrupt_ends_the_walk():
    tables, needs = keyed(schedule.gpipe(2, 50))
    done = []

    def perform(rank, action):
        time.sleep(0.01)
        done.append(action)
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGINT)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        driver.drive(tables, needs, perform)
    assert threading.active_count() == before
    assert len(done) < 50


# ------------------------------------------------------------------ a pipeline that is disturbed


@keras.saving.register_keras_serializable("driver_test")
class Guard(L.Layer):
    """Fails where a row begins with more than 100."""

    def call(self, x):
        tf.debugging.assert_less(x[:, 0], tf.cast(100.0, x.dtype), message="too large")
        return tf.identity(x)


def guarded():
    i = keras.Input((6,))
    x = L.Dense(8, activation="tanh", name="one")(i)
    x = L.Dense(6, kernel_initializer="identity", activation="linear", name="two")(x)
    y = L.Add(name="skip")([x, i])  # what is large in the input is large here
    y = Guard(name="guard")(y)
    return keras.Model(i, L.Dense(1, name="head")(L.Dense(5, name="three")(y)))


STAGES = ["two", "guard", "three"]


def pipeline(recompute=True, steps=1):
    keras.utils.set_random_seed(0)
    strategy = tfpar.MeshStrategy(mesh(pipe=4))
    with scope(strategy):
        model = tfpar.Pipeline(guarded, 4, stages=STAGES, recompute=recompute)
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(tfpar.AccumulatingOptimizer(optimizer, steps), "mse")
    return model


def numbers(rows=12):
    r = np.random.default_rng(0)
    return r.standard_normal((rows, 6)).astype("float32"), r.standard_normal((rows, 1))


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "residuals"])
@pytest.mark.parametrize("warm", [False, True], ids=["first batch", "later batch"])
def test_an_op_that_fails_in_stage_2(warm, recompute):
    """One error that names stage, micro-batch and layer; then training goes on as if it never was."""
    model, calm = pipeline(recompute), pipeline(recompute)
    x, y = numbers()
    if warm:
        for one in (model, calm):
            one.train_on_batch(x, y)
    bad = x.copy()
    bad[7, 0] = 1e6  # the third of four micro-batches
    threads = threading.active_count()
    with pytest.raises(
        tfpar.StageError, match="stage 2.*micro-batch 2.*layer 'guard' failed"
    ) as caught:
        model.fit(bad, y, batch_size=12, shuffle=False, verbose=0)
    assert (caught.value.stage, caught.value.micro_batch) == (2, 2)
    assert threading.active_count() == threads
    for one in (model, calm):
        one.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), calm.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(tfpar.StageError, match="layer 'guard' failed"):
        model.predict(bad, verbose=0)
    with pytest.raises(tfpar.StageError, match="layer 'guard' failed"):
        model.evaluate(bad, y, verbose=0)


@pytest.mark.parametrize("steps", [1, 2])
def test_failed_batches_leave_nothing_behind(steps):
    """Work that is under way when a batch fails once added to the gradients of the next."""
    model, calm = pipeline(steps=steps), pipeline(steps=steps)
    x, y = numbers()
    bad = x.copy()
    bad[-1, 0] = 1e6  # the last micro-batch
    for _ in range(3):
        for _ in range(2):
            with pytest.raises(tfpar.StageError, match="micro-batch 3"):
                model.train_on_batch(bad, y)
        for one in (model, calm):
            for _ in range(steps):
                one.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), calm.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_nan_passes_through_as_on_one_device():
    model = pipeline()
    x, y = numbers()
    bad = y.copy()
    bad[5] = np.nan
    history = model.fit(
        x,
        bad,
        batch_size=12,
        epochs=5,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN()],
    )
    assert len(history.history["loss"]) == 1 and np.isnan(history.history["loss"][0])


def test_an_interrupt_in_fit():
    """Ctrl-C in the middle of a batch: fit ends, no thread is left, and training can go on."""
    model, calm = pipeline(), pipeline()
    x, y = numbers()
    for one in (model, calm):
        one.train_on_batch(x, y)
    stock, seen = driver._Walk.run, []

    def run(self, rank, action):
        stock(self, rank, action)
        seen.append(action)
        if len(seen) == 10:
            os.kill(os.getpid(), signal.SIGINT)

    threads = threading.active_count()
    driver._Walk.run = run
    try:
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=12, epochs=100, verbose=0)
    finally:
        driver._Walk.run = stock
    assert threading.active_count() == threads
    for one in (model, calm):
        one.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), calm.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_an_error_in_a_layers_own_code_says_where():
    class Broken(L.Layer):
        def call(self, x):
            if in_step():
                raise TypeError("not today")
            return x

    def build():
        i = keras.Input((6,))
        return keras.Model(i, L.Dense(1)(Broken(name="broken")(L.Dense(4, name="one")(i))))

    strategy = tfpar.MeshStrategy(mesh(pipe=2))
    with scope(strategy):
        model = tfpar.Pipeline(build, 2, stages=["broken"])
        model.compile("adam", "mse")
    with pytest.raises(TypeError, match="not today") as caught:
        model.fit(*numbers(), verbose=0)
    assert any("stage 1" in note for note in caught.value.__notes__)
