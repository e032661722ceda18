"""The reported faults under MeshStrategy: every case gives the numbers of one device."""

import contextlib

import cases
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfpar
from tfpar.testing import assert_same_training, relative_error

L = keras.layers
MESHES = {"data=4": (4, 1), "model=4": (1, 4), "2x2": (2, 2)}
REFUSED = {"24"}  # by name, see below
IN_FLOAT64 = ("01", "12", "13", "15", "20", "27", "29", "32", "36")


def mesh_strategy(mesh, layouts=None):
    data, model = MESHES[mesh]
    devices = [f"CPU:{i}" for i in range(4)]
    return tfpar.MeshStrategy(tfpar.Mesh(data=data, model=model, devices=devices), layouts)


def check(case, mesh, optimizer=None, **kwargs):
    return compare(
        lambda: cases.build(case), case, mesh_strategy(mesh, case.layouts), optimizer, **kwargs
    )


def compare(build, case, strategy, optimizer=None, **kwargs):
    """Trains a case as it wants to be trained, on one device and under `strategy`."""
    compile_args = case.compile_args()
    return assert_same_training(
        build,
        list(case.batches) if case.batches else case.data,
        strategy,
        optimizer=optimizer or case.optimizer,
        loss=case.loss(),
        metrics=compile_args.pop("metrics", None),
        compile_args=compile_args,
        batch_size=case.batch,
        epochs=case.epochs,
        use_fit=case.use_fit,
        seed=case.seed,
        **{"tolerance": case.tolerance, **kwargs},
    )


def adam(case):
    # A larger epsilon keeps the noise that Adam makes of zero gradients out of the outputs.
    epsilon = 1e-4 if case.through_outputs else 1e-7
    return lambda: keras.optimizers.Adam(0.01, epsilon=epsilon)


RUNS = [id for id in cases.CASE_IDS if id not in REFUSED]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case_id", RUNS)
def test_with_its_own_optimizer(case_id, mesh):
    check(cases.CASES[case_id](), mesh)


@pytest.mark.parametrize(
    "mesh", [pytest.param(m, marks=[] if m == "2x2" else pytest.mark.slow) for m in MESHES]
)
@pytest.mark.parametrize("case_id", RUNS)
def test_with_adam(case_id, mesh):
    """Adam divides by the gradient's size: it shows wrong scales, SGD wrong values of state."""
    case = cases.CASES[case_id]()
    check(case, mesh, adam(case), through_outputs=case.through_outputs)


@pytest.mark.parametrize("optimizer", ["own", "adam"])
@pytest.mark.parametrize("case_id", IN_FLOAT64)
def test_in_float64_only_the_last_digits_differ(case_id, optimizer, float64):
    """What is left in float64 is no rounding: 1e-9 leaves no room for a small error of method."""
    case = cases.CASES[case_id]()

    def wide(a):
        return a.astype("float64") if a.dtype == "float32" else a

    case = case.but(data=keras.tree.map_structure(wide, case.data))
    adam = (lambda: keras.optimizers.Adam(0.01)) if optimizer == "adam" else None
    check(case, "2x2", adam, tolerance=1e-9, through_outputs=case.through_outputs if adam else ())


def test_24_jit_compile_is_refused_by_name():
    """Without the refusal: a cross-device resource error from within XLA, or silence."""
    with pytest.raises(ValueError, match="jit_compile"):
        check(cases.CASES["24"](), "2x2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case_id, mutant", [(id, name) for id, make in cases.CASES.items() for name in make().mutants]
)
def test_every_mutant_is_told_from_the_reference(case_id, mutant):
    case = cases.CASES[case_id]()
    assert cases.error(case, case.mutants[mutant](case)) > 10 * case.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("case_id", [id for id in RUNS if id not in ("29", "31")])
def test_parts_weighed_rightly_equal_the_whole_batch(case_id):
    """The yardstick of the mutants itself: in right proportions, parts give the reference."""
    case = cases.CASES[case_id]()
    weights = cases.train_in_parts(case, parts=4, combine=case.combine)
    assert cases.error(case, weights) < case.tolerance


# ------------------------------------------------------------------ 25, 34: dropout
@contextlib.contextmanager
def _dropout(mesh, layouts=None, seed=3):
    """A model whose `predict`-like step shows the mask of each row: ones through Dropout."""
    with mesh_strategy(mesh, layouts).scope():
        i = L.Input((64,))
        z = L.Dense(64, kernel_initializer="identity", trainable=False, name="up")(i)
        z = L.Dropout(0.5, seed=seed, name="dropout")(z)
        yield keras.Model(i, z)


def _masks(model, steps=1, rows=8):
    """The masks (steps, rows, 64) of `steps` training steps."""
    model.compile("sgd", lambda y, y_pred: keras.ops.mean(y_pred), run_eagerly=False)
    return np.stack([_training_outputs(model, rows) for _ in range(steps)])


def _training_outputs(model, rows):
    strategy = model.distribute_strategy
    return strategy.run(lambda x: model(x, training=True), (np.ones((rows, 64), "float32"),)) > 0


@pytest.mark.parametrize("mesh", MESHES)
def test_25_dropout_masks(mesh):
    """Masks differ over data shards and steps, have the right rate, and repeat for one seed."""
    with _dropout(mesh) as model:
        masks = _masks(model, steps=3)
    with _dropout(mesh) as model:
        again = _masks(model, steps=3)
    with _dropout(mesh, seed=4) as model:
        other = _masks(model, steps=3)
    np.testing.assert_array_equal(masks, again)
    assert (masks != other).mean() > 0.3
    rows = masks.reshape(-1, 64)
    for i in range(len(rows)):  # 24 masks of 64 entries, all different
        for k in range(i):
            assert 0.2 < (rows[i] != rows[k]).mean() < 0.8
    assert abs(masks.mean() - 0.5) < 0.06


def test_25_dropout_goes_on_after_a_checkpoint(tmp_path):
    """Where training resumes it must not draw the masks of its first steps again.

    Keras' own files leave the states of seed generators out; they are among `model.variables`.
    """

    def checkpoint(model):
        return tf.train.Checkpoint(variables=[v.value for v in model.variables])

    with _dropout("2x2") as model:
        _masks(model, steps=2)
        path = checkpoint(model).write(str(tmp_path / "half"))
        after = _masks(model, steps=2)
    with _dropout("model=4") as model:
        checkpoint(model).read(path).assert_consumed()
        np.testing.assert_array_equal(after, _masks(model, steps=2))


@pytest.mark.parametrize("mesh", ["model=4", "2x2"])
def test_34_dropout_agrees_over_model_shards_on_replicated_activations(mesh):
    """Each device of a row of `model` must draw the same mask, or copies of an activation part."""
    import tensorflow as tf

    with _dropout(mesh) as model:
        strategy = model.distribute_strategy
        x = strategy.pack(np.ones((8, 64), "float32"))
        step = tf.function(lambda x: strategy.run(lambda x: model(x, training=True), (x,)))
        parts = [np.asarray(p) for p in dtensor.unpack(step(x))]
    data, split = MESHES[mesh]
    parts = np.stack(parts).reshape(data, split, -1, 64)
    for k in range(1, split):
        np.testing.assert_array_equal(parts[:, 0], parts[:, k])


@pytest.mark.parametrize("mesh", ["model=4", "2x2"])
def test_34_dropout_on_split_activations_draws_every_shard_anew(mesh):
    """A shard that repeats its neighbour's mask drops features together."""
    with _dropout(mesh, {r"up/kernel": (None, "model")}) as model:
        masks = _masks(model, steps=4)
    shards = masks.reshape(-1, MESHES[mesh][1], 64 // MESHES[mesh][1])
    for k in range(1, shards.shape[1]):
        assert 0.3 < (shards[:, 0] != shards[:, k]).mean() < 0.7


# ------------------------------------------------------------------ faults without a case
def test_38_replicated_weights_stay_the_same_on_all_devices():
    """Partial gradients of norms and biases must be summed, or their copies drift apart."""
    case = cases.CASES["32"]()
    with mesh_strategy("2x2", case.layouts).scope():
        model = cases.build(case)
        model.compile(keras.optimizers.Adam(0.01), case.loss())
    model.fit(*case.data, batch_size=8, verbose=0)
    for variable in model.weights + model.optimizer.variables:
        if variable.value.layout.is_fully_replicated():
            first, *others = [np.asarray(s) for s in variable.value.shards()]
            for other in others:
                np.testing.assert_array_equal(first, other, err_msg=variable.path)


@pytest.mark.parametrize("mesh", MESHES)
def test_same_seed_gives_the_same_initial_values(mesh):
    """A column-split kernel initialised per shard would repeat itself or scale wrongly."""
    case = cases.CASES["32"]()
    keras.utils.set_random_seed(1)
    want = case.build().get_weights()
    keras.utils.set_random_seed(1)
    with mesh_strategy(mesh, case.layouts).scope():
        assert relative_error(case.build().get_weights(), want) == 0


@pytest.mark.parametrize("there", [None, *MESHES])
@pytest.mark.parametrize("here", [None, "2x2"])
def test_51_goes_on_on_another_topology(here, there, tmp_path):
    """Half the steps here, the rest there: as if never stopped, moments and schedule included."""
    case = cases.CASES["51"]()
    file = str(tmp_path / "half.keras")

    def scope(mesh):
        return mesh_strategy(mesh, case.layouts).scope() if mesh else contextlib.nullcontext()

    with scope(here):
        model = cases.compiled(case)
    batches = cases.global_batches(case)
    losses = [model.train_on_batch(x, y) for x, y, _ in batches[: case.stop_after]]
    model.save(file)
    with scope(there):
        model = keras.models.load_model(file)
    losses += [model.train_on_batch(x, y) for x, y, _ in batches[case.stop_after :]]
    want = cases.reference(case)
    assert relative_error(losses, want["losses"]) < case.tolerance
    assert relative_error(model.get_weights(), want["weights"]) < case.tolerance
    assert int(model.optimizer.iterations.numpy()) == len(batches)
