"""The reported faults under an AccumulatingOptimizer: windows give the numbers of whole batches."""

import contextlib
import functools

import cases
import keras
import pytest
import tensorflow as tf
from mesh_test import mesh_strategy

import tfpar
from tfpar.testing import relative_error

IDS = [id for id, make in cases.CASES.items() if "accum" in (make().kind, *make().also)]
PLACES = ("one", "data=4", "model=4", "2x2", "mirrored")


def strategy_for(place, layouts):
    if place == "one":
        return None
    if place == "mirrored":
        # Its default, collectives, and DTensor use the same group keys in one process.
        one_place = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(4)], cross_device_ops=one_place
        )
    return mesh_strategy(place, layouts)


def micro_batches(case, parts):
    """The batches of a case cut into micro-batches, in order: tuples of arrays."""
    pieces = []
    for batch in cases.global_batches(case):
        for piece in cases.split(batch, parts, None if parts else case.micro):
            pieces.append(piece if piece[2] is not None else piece[:2])
    return pieces


def dataset(pieces):
    """A dataset of one epoch; over replicas each takes its rows of every piece."""
    parts = [
        tf.data.Dataset.from_tensor_slices(p).batch(len(tf.nest.flatten(p)[0])) for p in pieces
    ]
    return functools.reduce(tf.data.Dataset.concatenate, parts)


class DenseAdam(keras.optimizers.Adam):
    """Adam on the true gradient. Keras' own squares each occurrence of a repeated id by itself."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(tf.convert_to_tensor(gradient), variable, learning_rate)


def train(case, place, optimizer):
    """Trains the case in windows; gives the model."""
    parts = None if case.micro else 2
    steps = 2 if parts else -(-case.batch // case.micro)
    strategy = strategy_for(place, case.layouts)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = cases.build(case)
        model.compile(
            tfpar.AccumulatingOptimizer(optimizer(), steps),
            loss=case.loss(),
            **{"jit_compile": False, **case.compile_args()},
        )
    model.fit(dataset(micro_batches(case, parts)), epochs=case.epochs, verbose=0)
    return model


def check(case, place, optimizer, reference=None):
    keras.utils.set_random_seed(case.seed)
    expected = cases.reference(case.but(optimizer=reference or optimizer))
    model = train(case, place, optimizer)
    assert int(model.optimizer.iterations.numpy()) == len(expected["losses"])
    for got, wanted, weight in zip(model.get_weights(), expected["weights"], model.weights):
        if not any(pattern in weight.path for pattern in case.through_outputs):
            error = relative_error(got, wanted)
            assert error < case.tolerance, f"{weight.path} is off by {error:.1e}"


def places(*default):
    return [pytest.param(p, marks=[] if p in default else pytest.mark.slow) for p in PLACES]


# By name: XLA cannot compile a step that DTensor splits or replicas share; over replicas nobody can
# tell whether an own loss is scaled by their number.
REFUSED = {
    ("24", "mirrored"): "jit_compile=True",
    **{("24", mesh): "jit_compile=True" for mesh in ("data=4", "model=4", "2x2")},
    ("21", "mirrored"): "not one of Keras' losses",
}


# Stock Keras cannot begin with a batch that the replicas do not divide evenly.
CANNOT_BEGIN = {(id, "mirrored") for id in ("40", "44", "46", "47")}


def check_or_refused(case, place, *args):
    if (case.id, place) in CANNOT_BEGIN:
        pytest.skip("the first batch does not divide over the replicas")
    words = REFUSED.get((case.id, place))
    with pytest.raises(ValueError, match=words) if words else contextlib.nullcontext():
        check(case, place, *args)


@pytest.mark.parametrize("place", places("one", "mirrored"))
@pytest.mark.parametrize("case_id", IDS)
def test_with_its_own_optimizer(case_id, place):
    case = cases.CASES[case_id]()
    check_or_refused(case, place, case.optimizer)


@pytest.mark.parametrize("place", places("2x2"))
@pytest.mark.parametrize("case_id", IDS)
def test_with_adam(case_id, place):
    case = cases.CASES[case_id]()
    epsilon = 1e-4 if case.through_outputs else 1e-7
    adam = lambda kind: lambda: kind(0.01, epsilon=epsilon)
    check_or_refused(case, place, adam(keras.optimizers.Adam), adam(DenseAdam))
