"""A model made a `tfpar.Pipeline` trains as on one device, whatever it is made of."""

import functools

import fit_test
import keras
import numpy as np
import pytest
import tensorflow as tf
from accumulation_test import DenseAdam

import tfpar
from tfpar.testing import assert_same_training, relative_error

L = keras.layers
O = keras.optimizers


def strategy_on(pipe, data=1, model=1, layouts=None, **kwargs):
    return tfpar.MeshStrategy(fit_test.mesh(data, model, pipe), layouts, **kwargs)


def piped(build, micro_batches=3, **kwargs):
    """`build` on one device, a pipeline in the scope of a strategy."""

    def made():
        if tf.distribute.has_strategy():
            return tfpar.Pipeline(build, micro_batches=micro_batches, **kwargs)
        return build()

    return made


def rng(seed=0):
    return np.random.default_rng(seed)


def mlp(widths=(8, 7, 9, 6), outputs=1):
    x = i = keras.Input((6,))
    for k, width in enumerate(widths):
        x = L.Dense(width, activation="tanh", name=f"hidden_{k}")(x)
    return keras.Model(i, L.Dense(outputs, name="head")(x))


def numbers(rows=26, inputs=6, outputs=1):
    return rng().standard_normal((rows, inputs)), rng(1).standard_normal((rows, outputs))


def same(build, data=None, mesh=(2, 1, 1), layouts=None, zero=0, optimizer=None, **kwargs):
    pipeline = kwargs.pop("pipeline", {})
    settings = dict(loss="mse", batch_size=10, epochs=2, tolerance=1e-9)
    return assert_same_training(
        piped(build, **pipeline),
        numbers() if data is None else data,
        strategy_on(*mesh, layouts=layouts, zero=zero),
        optimizer=optimizer or (lambda: O.AdamW(0.01, global_clipnorm=0.5)),
        **{**settings, **kwargs},
    )


# ------------------------------------------------------------------ optimizers

OPTIMIZERS = {
    "AdamW with global clipping": lambda: O.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1),
    "Adam with clipnorm": lambda: O.Adam(0.01, clipnorm=0.1),
    "RMSprop": lambda: O.RMSprop(0.01, momentum=0.9, centered=True),
    "Nadam": lambda: O.Nadam(0.01),
    "Adafactor": lambda: O.Adafactor(0.05),
    "Lamb": lambda: O.Lamb(0.01),
    "Lion": lambda: O.Lion(0.001),
    "Ftrl": lambda: O.Ftrl(0.05),
    "SGD with averages": lambda: O.SGD(0.05, momentum=0.9, use_ema=True, ema_overwrite_frequency=3),
    "a schedule": lambda: O.Adam(O.schedules.ExponentialDecay(0.05, 2, 0.7)),
    "a scaled loss": lambda: O.Adam(0.01, loss_scale_factor=8.0, global_clipnorm=0.1),
    "a dynamic scale": lambda: O.LossScaleOptimizer(
        O.Adam(0.01, global_clipnorm=0.1), initial_scale=8.0, dynamic_growth_steps=2
    ),
}


# The others differ from these in what each does to a weight by itself.
BY_DEFAULT = (
    "AdamW with global clipping",
    "Nadam",
    "Adafactor",
    "SGD with averages",
    "a dynamic scale",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in BY_DEFAULT else pytest.mark.slow) for n in OPTIMIZERS]
)
def test_optimizers(name, float64):
    """One optimizer over all stages: counters, norms, scales and averages are those of one."""
    same(mlp, mesh=(3, 1, 1), optimizer=OPTIMIZERS[name])


def test_constraints_and_frozen_layers(float64):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                L.Dense(8, kernel_constraint="non_neg"),
                L.Dense(7, activation="tanh", trainable=False),
                L.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.5)),
                L.Dense(1),
            ]
        )
        return model

    same(build, mesh=(2, 2, 1))


def test_first_stages_without_trainable_weights(float64):
    """Idle stage meshes keep the optimizer's counters too."""

    def build():
        i = keras.Input((6,))
        x = L.Dense(8, trainable=False, name="frozen")(i)
        x = L.Activation("tanh", name="activation")(x)
        return keras.Model(i, L.Dense(1)(x))

    schedule = lambda: O.Adam(O.schedules.ExponentialDecay(0.05, 2, 0.7), global_clipnorm=0.5)
    same(build, mesh=(2, 1, 1), pipeline=dict(stages=["activation"]), optimizer=schedule)


# ------------------------------------------------------------------ models


def transformer(vocabulary=11, width=8, length=7, tied=False):
    tokens = keras.Input((length,), dtype="int32")
    embedding = L.Embedding(vocabulary, width, mask_zero=True, name="embedding")
    x = embedding(tokens)
    for k in range(2):
        y = L.LayerNormalization(name=f"norm_{k}")(x)
        x = x + L.MultiHeadAttention(2, 4, name=f"attention_{k}")(y, y, use_causal_mask=True)
        y = L.Dense(2 * width, activation="gelu", name=f"up_{k}")(x)
        x = x + L.Dense(width, name=f"down_{k}")(y)
    if tied:
        logits = Reverse(embedding, name="reverse")(x)
    else:
        logits = L.Dense(vocabulary, name="logits")(x)
    return keras.Model(tokens, logits)


@keras.saving.register_keras_serializable("pipeline_test")
class Reverse(L.Layer):
    """Logits from the table of an embedding."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding
        self.supports_masking = True

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.embedding.embeddings))


def sentences(rows=22, vocabulary=11, length=7):
    tokens = rng().integers(1, vocabulary, (rows, length)).astype("int32")
    for row, end in enumerate(rng(2).integers(2, length + 1, rows)):
        tokens[row, end:] = 0
    return tokens, rng(1).integers(0, vocabulary, (rows, length)).astype("int32")


LAYOUTS = {
    r"attention_\d/(query|key|value)/kernel": (None, "model", None),
    r"attention_\d/attention_output/kernel": ("model", None, None),
    r"up_\d/kernel": (None, "model"),
    r"up_\d/bias": ("model",),
    r"down_\d/kernel": ("model", None),
}


def _transformers():
    few = [((2, 2, 2), True, True), ((4, 1, 2), True, False), ((2, 2, 2), False, False)]
    for mesh in ((2, 2, 2), (4, 1, 2)):
        for tied in (True, False):
            for recompute in (True, False):
                marks = [] if (mesh, tied, recompute) in few else [pytest.mark.slow]
                name = f"{mesh} {'tied' if tied else ''} {'recompute' if recompute else ''}"
                yield pytest.param(mesh, tied, recompute, marks=marks, id=name)


@pytest.mark.parametrize("mesh, tied, recompute", _transformers())
def test_a_transformer_whose_masks_travel_over_pipe_data_and_model(mesh, tied, recompute, float64):
    """Padding differs between micro-batches: a mean of their means would be wrong."""
    same(
        functools.partial(transformer, tied=tied),
        sentences(),
        mesh,
        LAYOUTS,
        # With a sparse gradient, as untied tables have, one device's norm is not that of the sum.
        optimizer=lambda: DenseAdam(0.01, global_clipnorm=0.3 if tied else None),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        pipeline=dict(recompute=recompute),
    )


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_zero(zero, float64):
    same(mlp, mesh=(2, 2, 1), zero=zero)


def test_outputs_with_denominators_of_their_own(float64):
    """Two masked outputs and a plain one: three parts of the gradient, each with its own weight."""

    def build():
        tokens, row = keras.Input((7,), dtype="int32", name="tokens"), keras.Input((6,), name="row")
        x = L.Embedding(11, 8, mask_zero=True)(tokens)
        y = L.Dense(8, activation="tanh", kernel_regularizer="l2")(row)
        z = L.Dense(8, activation="tanh", activity_regularizer="l1")(x + L.Reshape((1, 8))(y))
        a = L.Dense(11, name="a")(x)
        b = L.Dense(3, name="b")(z)
        c = L.Dense(2, name="c")(y)
        return keras.Model({"tokens": tokens, "row": row}, {"a": a, "b": b, "c": c})

    tokens, targets = sentences()
    x = {"tokens": tokens, "row": rng(3).standard_normal((22, 6))}
    y = {
        "a": targets,
        "b": rng(4).standard_normal((22, 7, 3)),
        "c": rng(5).standard_normal((22, 2)),
    }
    weights = {"a": rng(6).random((22, 7)), "b": rng(7).random((22, 7)), "c": np.ones(22)}
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for data, recompute in (((x, y), False), ((x, y, weights), True)):
        same(
            build,
            data,
            (3, 1, 1),
            optimizer=lambda: DenseAdam(0.01),
            loss={"a": cross_entropy, "b": "mse", "c": keras.losses.Huber(reduction="sum")},
            metrics={"c": ["mae"]},
            compile_args=dict(loss_weights={"a": 0.5, "b": 2.0, "c": 0.1}),
            pipeline=dict(recompute=recompute),
        )


def in_micro_batches(build, data, batch, micro, epochs, optimizer):
    """What one device gives that takes the same micro-batches one after the other."""
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(tfpar.AccumulatingOptimizer(optimizer(), batch // micro), "mse")
    pieces = tf.data.Dataset.from_tensor_slices(data).batch(micro)
    model.fit(pieces, epochs=epochs, verbose=0)
    return model


@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "residuals"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_statistics_move_once_a_micro_batch_in_order(schedule, recompute, float64):
    """Recomputing a BatchNormalization by calling it again would move its statistics twice."""

    def build():
        norm = lambda: L.BatchNormalization(momentum=0.7)
        stack = [L.Dense(8, activation="tanh"), norm(), L.Dense(7), norm(), L.Dense(1)]
        return keras.Sequential([keras.Input((6,)), *stack])

    optimizer = lambda: O.Adam(0.01)
    one = in_micro_batches(build, numbers(24), 12, 3, 2, optimizer)
    keras.utils.set_random_seed(0)
    with strategy_on(2).scope():
        many = piped(build, 4, schedule=schedule, recompute=recompute)()
        many.compile(optimizer(), "mse")
    many.fit(*numbers(24), batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert relative_error(many.get_weights(), one.get_weights()) < 1e-9


def test_recompute_draws_the_same_dropout(float64):
    """Both ways train alike, mask for mask; a second draw would part them."""
    trained = []
    for recompute in (True, False):
        keras.utils.set_random_seed(0)
        build = lambda: keras.Sequential(
            [keras.Input((6,)), L.Dense(32), L.Dropout(0.5), L.Dense(9), L.Dropout(0.4), L.Dense(1)]
        )
        with strategy_on(3, 2).scope():
            model = piped(build, 4, recompute=recompute)()
            model.compile("adam", "mse")
        model.fit(*numbers(24), batch_size=12, epochs=2, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert relative_error(*trained) < 1e-9
    assert relative_error(trained[0], build().get_weights()) > 1e-3


def test_a_layer_that_moves_its_statistics_stays_in_one_stage(float64):
    """A BatchNormalization that is called twice cannot be in two places."""

    def build():
        norm, i = L.BatchNormalization(), keras.Input((6,))
        x = norm(L.Dense(6)(i))
        return keras.Model(i, L.Dense(1)(L.Dense(4)(norm(L.Dense(6)(x)))))

    with strategy_on(2).scope():
        model = piped(build)()
    homes = [stage.index for stage in model.pipeline.stages for n in stage.names if "norm" in n]
    assert len(homes) == 2 and len(set(homes)) == 1


def test_lists_of_stage_models(float64):
    def stages():
        first = keras.Sequential([keras.Input((6,)), L.Dense(8, activation="tanh")], name="first")
        second = keras.Sequential([keras.Input((8,)), L.Dense(7, activation="tanh")], name="second")
        return [first, second, L.Dense(1, name="third")]

    def build():
        if not tf.distribute.has_strategy():
            return keras.Sequential([keras.Input((6,)), *stages()])
        return tfpar.Pipeline(stages(), micro_batches=3)

    assert_same_training(
        build, numbers(), strategy_on(3), loss="mse", batch_size=10, epochs=2, tolerance=1e-9
    )
    with strategy_on(3).scope():
        model = build()
    assert [stage.names[0].split("/")[0] for stage in model.pipeline.stages] == [
        "first",
        "second",
        "third",
    ]


def test_a_table_of_ones_own(float64):
    table = [
        [("F", 0, 0), ("F", 1, 0), ("F", 2, 0), ("B", 1, 0), ("B", 0, 0), ("B", 2, 0)],
        [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0), ("F", 2, 0), ("B", 2, 0)],
    ]
    same(mlp, pipeline=dict(schedule=table))


@pytest.mark.parametrize(
    "mesh, schedule",
    [((2, 2, 1), "1f1b"), ((2, 1, 1), "interleaved"), ((2, 1, 1), "gpipe")],
    ids=str,
)
def test_windows_of_batches(mesh, schedule, float64):
    """4 stages' worth of micro-batches in windows of 2 fit batches: scaled exactly once."""

    x, y = numbers(40)
    keras.utils.set_random_seed(0)
    one = mlp()
    one.compile(O.Adam(0.01, global_clipnorm=0.1), "mse")
    one.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    keras.utils.set_random_seed(0)
    with strategy_on(*mesh).scope():
        many = piped(mlp, 4, schedule=schedule)()
        optimizer = tfpar.AccumulatingOptimizer(O.Adam(0.01, global_clipnorm=0.1), steps=2)
        many.compile(optimizer, "mse")
    many.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    assert int(many.optimizer.iterations.numpy()) == int(one.optimizer.iterations.numpy()) == 4
    assert relative_error(many.get_weights(), one.get_weights()) < 1e-9
    many.fit(x[:10], y[:10], batch_size=10, verbose=0)  # a window that the epoch's end closes
    one.fit(x[:10], y[:10], batch_size=10, verbose=0)
    assert relative_error(many.get_weights(), one.get_weights()) < 1e-9


# ------------------------------------------------------------------ files, and going on elsewhere


def test_what_it_saves_is_the_plain_model(tmp_path):
    with strategy_on(2, 2, 2, LAYOUTS).scope():
        model = piped(transformer)()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*sentences(), batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert type(plain.optimizer) is O.Adam and int(plain.optimizer.iterations.numpy()) == 3
    tokens = sentences()[0]
    np.testing.assert_allclose(
        plain.predict(tokens, verbose=0), model.predict(tokens, verbose=0), atol=1e-5
    )
    with strategy_on(4).scope():
        again = piped(lambda: keras.models.load_model(tmp_path / "model.keras", compile=False))()
        other = piped(transformer)()
    other.load_weights(tmp_path / "model.weights.h5")
    for one in (again, other):
        assert relative_error(one.get_weights(), model.get_weights()) == 0


@pytest.mark.parametrize(
    "there",
    [(4, 1, 1), (1, 2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow), None],
    ids=str,
)
def test_training_goes_on_on_another_mesh(there, tmp_path, float64):
    """Weights, moments, counters and an open window from pipe=2 onto any mesh, or none."""
    x, y = numbers(60)

    def make(mesh):
        keras.utils.set_random_seed(0)
        with fit_test.scope(mesh and strategy_on(*mesh)):
            model = piped(mlp)() if mesh and mesh[0] > 1 else mlp()
            schedule = O.schedules.ExponentialDecay(0.05, 2, 0.7)
            model.compile(tfpar.AccumulatingOptimizer(O.Adam(schedule), steps=2), "mse")
        return model

    def train(model, batches):
        for k in batches:
            model.train_on_batch(x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10])

    whole = make(None)
    train(whole, range(6))
    first = make((2, 1, 1))
    train(first, range(3))
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(str(tmp_path / "c"))
    second = make(there)
    second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).read(path)
    train(second, range(3, 6))
    assert relative_error(second.get_weights(), whole.get_weights()) < 1e-9


# ------------------------------------------------------------------ everyday use


def test_everyday_use():
    """Callbacks, validation, steps_per_execution, summaries and calls as of any model."""
    x, y = (a.astype("float32") for a in numbers(40))
    logs, results = [], []
    for strategy in (None, strategy_on(2, 2)):
        keras.utils.set_random_seed(0)
        with fit_test.scope(strategy):
            model = piped(mlp)()
            model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2)
        history = model.fit(
            x,
            y,
            batch_size=7,
            epochs=3,
            validation_split=0.25,
            shuffle=False,
            verbose=0,
            callbacks=[
                keras.callbacks.ReduceLROnPlateau("val_loss", patience=0, min_delta=10.0),
                keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
                keras.callbacks.TerminateOnNaN(),
            ],
        ).history
        logs.append(history)
        results.append(
            [
                model.evaluate(x, y, batch_size=9, verbose=0),
                model.predict(x, batch_size=9, verbose=0),
                model.predict_on_batch(x[:5]),
                model.test_on_batch(x[:5], y[:5]),
                np.asarray(model(x[:3])),
                model.count_params(),
                float(model.optimizer.learning_rate.numpy()),
            ]
        )
        model.summary(print_fn=lambda line: None)
    assert logs[0].keys() == logs[1].keys()
    assert relative_error(logs[1], logs[0]) < 3e-5
    assert relative_error(results[1], results[0]) < 3e-5


def test_float16_has_one_loss_scale():
    """An overflow on one stage skips the update of all, and halves the scale once."""
    x, y = (a.astype("float32") for a in numbers(24))
    keras.config.set_dtype_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(0)
        with strategy_on(3).scope():
            model = piped(mlp, 4)()
            model.compile(O.Adam(0.01, global_clipnorm=1.0), "mse")
        scaled = model.optimizer.inner_optimizer
        model.train_on_batch(x, y)
        before, scale = model.get_weights(), float(scaled.dynamic_scale.numpy())
        assert int(model.optimizer.iterations.numpy()) == 1
        poisoned = y.copy()
        poisoned[3] = 1e38
        model.train_on_batch(x, poisoned)
        assert relative_error(model.get_weights(), before) == 0
        assert int(model.optimizer.iterations.numpy()) == 1
        assert float(scaled.dynamic_scale.numpy()) == scale / 2
        model.train_on_batch(x, y)
        assert int(model.optimizer.iterations.numpy()) == 2
        assert relative_error(model.get_weights(), before) > 1e-4
    finally:
        keras.config.set_dtype_policy("float32")


# ------------------------------------------------------------------ refusals


class Opaque(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(1)

    def call(self, x):
        return self.dense(x)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


class OwnApply(O.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply(grads, trainable_variables)


def _own_step():
    i = keras.Input((6,))
    return OwnStep(i, L.Dense(1)(L.Dense(4)(i)))


@pytest.mark.parametrize(
    "model, kwargs, words",
    [
        (Opaque, {}, "Functional model"),
        (lambda: keras.Sequential([L.Dense(3), L.Dense(1)]), {}, "keras.Input"),
        (_own_step, {}, "train_step"),
        (mlp, dict(micro_batches=0), "micro_batches"),
        (mlp, dict(schedule="2f2b"), "2f2b"),
        (mlp, dict(stages="best"), "best"),
        (mlp, dict(stages=["nowhere"]), "nowhere"),
        (mlp, dict(stages=["hidden_1", "hidden_2"]), "1 layers"),
        (mlp, dict(stages=["hidden_0"]), "hidden_0"),
        (mlp, dict(memory=100), "bytes"),
        (lambda: keras.Sequential([keras.Input((6,)), L.Dense(1)]), {}, "at most 1 stages"),
        (mlp, dict(schedule=[[("F", 0, 0), ("B", 0, 0)]], micro_batches=1), "stages=2"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, kwargs, words):
    with strategy_on(2).scope(), pytest.raises(ValueError, match=words):
        tfpar.Pipeline(model, **{"micro_batches": 3, **kwargs})


def test_zero_bubble_tables_are_refused_by_name():
    table = [[("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]] * 2
    with strategy_on(2).scope(), pytest.raises(ValueError, match="W"):
        tfpar.Pipeline(mlp, 1, schedule=table)


@pytest.mark.parametrize(
    "optimizer, kwargs, words",
    [
        ("adam", dict(run_eagerly=True), "run_eagerly"),
        ("adam", dict(jit_compile=True), "jit_compile"),
        (OwnApply(0.1), {}, "apply"),
        ("noise", {}, "measure_noise"),
    ],
    ids=["run_eagerly", "jit_compile", "apply", "measure_noise"],
)
def test_what_it_would_not_do_is_refused_by_compile(optimizer, kwargs, words):
    with strategy_on(2).scope():
        model = piped(mlp)()
        if optimizer == "noise":
            optimizer = tfpar.AccumulatingOptimizer(O.Adam(), 2, measure_noise=True)
        with pytest.raises(ValueError, match=words):
            model.compile(optimizer, "mse", **kwargs)


def test_other_places_are_refused():
    with pytest.raises(ValueError, match="pipe > 1"):
        tfpar.Pipeline(mlp, 3)
    with strategy_on(1, 2).scope(), pytest.raises(ValueError, match="pipe > 1"):
        tfpar.Pipeline(mlp, 3)
    outside = mlp()
    with strategy_on(2).scope(), pytest.raises(ValueError, match="outside strategy.scope"):
        tfpar.Pipeline(outside, 3)
    with strategy_on(2).scope():
        compiled = mlp()
        compiled.compile("adam", "mse")
        with pytest.raises(ValueError, match="compiled already"):
            tfpar.Pipeline(compiled, 3)
    with pytest.raises(ValueError, match="micro_batches"):
        strategy_on(2, micro_batches=2)


def test_a_model_without_pipeline_is_refused_where_pipe_is_above_1():
    with strategy_on(2).scope():
        model = mlp()
        model.compile("adam", "mse")
    with pytest.raises(ValueError, match="tfpar.Pipeline"):
        model.fit(*numbers(), verbose=0)


# ------------------------------------------------------------------ faults that random models found


def test_a_shared_weight_with_two_denominators(float64):
    """The second accumulator of a weight on two stages once lived on one of them only."""

    def build():
        tokens, row = keras.Input((7,), dtype="int32"), keras.Input((6,))
        shared = L.Dense(8, activation="tanh", kernel_regularizer="l2", name="shared")
        a = shared(L.Embedding(11, 8, mask_zero=True)(tokens))
        b = shared(L.Dense(8, name="wide")(row))
        return keras.Model([tokens, row], [L.Dense(3, name="a")(a), L.Dense(2, name="b")(b)])

    y = [rng(4).standard_normal((22, 7, 3)), rng(5).standard_normal((22, 2))]
    same(
        build,
        ([sentences()[0], rng(3).standard_normal((22, 6))], y),
        (3, 1, 1),
        optimizer=lambda: DenseAdam(0.01),
        loss=["mse", "mse"],
    )


def test_layers_that_train_only_later(float64):
    """Freezing and unfreezing counts from the next compile on, as on one device."""
    x, y = numbers()
    trained = []
    for strategy in (None, strategy_on(2)):
        keras.utils.set_random_seed(0)
        with fit_test.scope(strategy):

            def build():
                model = mlp()
                model.get_layer("hidden_0").trainable = model.get_layer("hidden_1").trainable = (
                    False
                )
                return model

            model = piped(build, stages=["hidden_2"])()
            model.compile("adam", "mse")
            model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
            model.get_layer("hidden_0").trainable = model.get_layer("hidden_1").trainable = True
            model.get_layer("head").trainable = False
            model.compile("rmsprop", "mse")
            model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
        trained.append(model.get_weights())
    assert relative_error(trained[1], trained[0]) < 1e-9


@pytest.mark.parametrize("layer", [L.GRU, L.LSTM])
def test_recurrent_layers_that_keep_residuals(layer, float64):
    """Shapes that the backward pass reads from constants were once unknown there."""

    def build():
        i = keras.Input((4, 3))
        x = layer(5, return_sequences=True)(i)
        return keras.Model(i, L.Dense(1)(layer(4)(x)))

    data = rng().standard_normal((13, 4, 3)), rng(1).standard_normal((13, 1))
    same(build, data, (2, 1, 1), epochs=1, pipeline=dict(recompute=False))


def test_a_weight_without_gradient_does_not_decay(float64):
    """A gradient of zero in place of none has AdamW shrink what one device leaves alone."""

    def build():
        i = keras.Input((6,))
        x = L.Dense(6, name="silent")(i)
        y = L.Dense(1, name="loud")(L.Dense(5)(i))
        return keras.Model(i, [y, L.Dense(2, name="late")(x)])

    x, y = numbers()
    for recompute in (True, False):
        same(
            build,
            (x, [y, np.zeros((26, 2))]),
            (3, 1, 1),
            optimizer=lambda: O.AdamW(0.01, weight_decay=0.1),
            loss=["mse", None],
            pipeline=dict(recompute=recompute),
        )
