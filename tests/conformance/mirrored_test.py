"""The reported faults in the replica view: every case gives the numbers of one device."""

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_test import mirrored
from mesh_test import adam, compare

import tfpar
from tfpar.testing import assert_same_training

L = keras.layers
REFUSED = {"21", "24"}  # by name, see below
DATA_PARALLEL = ("12", "13", "15", "17", "18", "20", "27", "29", "31", "46", "59")
RUNS = [
    pytest.param(id, marks=[] if id in DATA_PARALLEL else pytest.mark.slow)
    for id in cases.CASE_IDS
    if id not in REFUSED
]


def check(case, optimizer=None, loss_is=None, replicas=4, **kwargs):
    return compare(
        lambda: cases.build(case), case, mirrored(replicas, loss_is=loss_is), optimizer, **kwargs
    )


@pytest.mark.parametrize("case_id", RUNS)
def test_with_its_own_optimizer(case_id):
    check(cases.CASES[case_id]())


@pytest.mark.parametrize("case_id", RUNS)
def test_with_adam(case_id):
    case = cases.CASES[case_id]()
    check(case, adam(case), replicas=3, through_outputs=case.through_outputs)


@pytest.mark.parametrize("optimizer", ["own", "adam"])
def test_21_an_own_loss_that_is_a_mean(optimizer):
    case = cases.CASES["21"]()
    check(case, adam(case) if optimizer == "adam" else None, loss_is="mean")


def test_21_an_own_loss_in_windows(float64):
    """Nobody divides such a loss by the number of replicas, so no window multiplies it by that."""

    class OwnLoss(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.losses.MeanSquaredError()(y, y_pred)

    def build():
        i = L.Input((3,))
        return OwnLoss(i, L.Dense(1)(L.Dense(4, "tanh")(i)))

    random = np.random.default_rng(0)
    assert_same_training(
        build,
        (random.normal(size=(22, 3)), random.normal(size=(22, 1))),
        mirrored(loss_is="mean"),
        # Adam would hide a gradient that is too large.
        optimizer=lambda: tfpar.AccumulatingOptimizer(keras.optimizers.SGD(0.1, 0.9), 2),
        batch_size=6,
        use_fit=True,
        tolerance=1e-9,
    )


def test_21_an_own_loss_is_refused_until_it_says_what_it_is():
    with pytest.raises(ValueError, match="compute_loss of its own.*loss_is"):
        check(cases.CASES["21"]())


def test_24_jit_compile_is_refused_by_name():
    with pytest.raises(ValueError, match="jit_compile"):
        check(cases.CASES["24"]())


def test_25_every_replica_draws_masks_of_its_own():
    def masks(seed=3):
        strategy = mirrored()
        with strategy.scope():
            model = keras.Sequential([L.Input((64,)), L.Dropout(0.5, seed=seed)])
        x = strategy.experimental_distribute_values_from_function(lambda _: tf.ones((2, 64)))
        step = tf.function(lambda x: strategy.run(lambda x: model(x, training=True), (x,)))
        drawn = [strategy.experimental_local_results(step(x)) for _ in range(3)]
        return np.array(drawn).reshape(-1, 64) > 0

    one, again, other = masks(), masks(), masks(seed=4)
    np.testing.assert_array_equal(one, again)
    assert (one != other).mean() > 0.3
    for i in range(len(one)):  # 24 masks of 64 entries, all different
        for k in range(i):
            assert 0.2 < (one[i] != one[k]).mean() < 0.8
