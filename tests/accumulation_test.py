"""AccumulatingOptimizer: a window of micro-batches is one batch, on one device and on meshes."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.testing import relative_error

L, O = keras.layers, keras.optimizers
DEVICES = [f"CPU:{i}" for i in range(4)]
LAYOUTS = {r"up/kernel": (None, "model"), r"down/kernel": ("model", None)}


def strategy_for(place):
    if place == "one":
        return None
    if place == "mirrored":
        # Its default, collectives, and DTensor use the same group keys in one process.
        one_place = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=one_place)
    data, model = {"data=4": (4, 1), "2x2": (2, 2)}[place]
    return tfpar.MeshStrategy(tfpar.Mesh(data=data, model=model, devices=DEVICES), LAYOUTS)


def scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def dense(**kwargs):
    def build():
        i = L.Input((6,))
        z = L.Dense(8, "tanh", name="up", **kwargs)(i)
        return keras.Model(i, L.Dense(1, name="down", **kwargs)(z))

    return build


def masked():
    """A token model with two outputs, one masked, and a penalty on activations."""
    i = L.Input((None,), dtype="int32")
    z = L.Embedding(11, 8, mask_zero=True, name="embedding")(i)
    z = L.Dense(8, "tanh", name="up", activity_regularizer=keras.regularizers.L2(0.1))(z)
    token = L.Dense(5, name="down", kernel_regularizer="l2")(z)
    pooled = L.Dense(1, name="row")(L.GlobalAveragePooling1D()(z))
    return keras.Model(i, [token, pooled])


def rows(n=24, seed=0):
    r = np.random.default_rng(seed)
    x = r.standard_normal((n, 6)).astype("float32")
    y = r.standard_normal((n, 1)).astype("float32")
    y[: n // 4] *= 4  # micro-batches differ
    return x, y


def tokens(n=24, seed=0):
    r = np.random.default_rng(seed)
    x = r.integers(1, 11, (n, 5)).astype("int32")
    for row in x:
        row[r.integers(1, 6) :] = 0
    y = [r.integers(0, 5, (n, 5)).astype("int32"), r.standard_normal((n, 1)).astype("float32")]
    return x, y


def take(nest, part):
    return keras.tree.map_structure(lambda a: a[part], nest)


def feed(model, data, cuts):
    """Trains on the pieces of `data` between `cuts`; whole windows only over replicas."""
    pieces = [tuple(take(a, slice(start, end)) for a in data) for start, end in zip(cuts, cuts[1:])]
    if model.distribute_strategy.num_replicas_in_sync == 1:
        for piece in pieces:
            model.train_on_batch(*piece)
        return model
    # Keras' train_on_batch hands the whole batch to every replica.
    as_tuples = [keras.tree.map_structure(tf.convert_to_tensor, piece) for piece in pieces]
    as_tuples = [(x, tuple(y) if isinstance(y, list) else y) for x, y in as_tuples]
    parts = [tf.data.Dataset.from_tensor_slices(p).batch(len(p[0])) for p in as_tuples]
    model.fit(functools.reduce(tf.data.Dataset.concatenate, parts), verbose=0)
    return model


def assert_close(model, other, tolerance=2e-6):
    for a, b in zip(model.weights, other.weights):
        assert relative_error(a, b) < tolerance, f"{a.path}: {relative_error(a, b):.1e}"


def compiled(strategy, build, optimizer, seed=3, **kwargs):
    keras.utils.set_random_seed(seed)
    with scope(strategy):
        model = build()
        model.compile(optimizer(), **{"loss": "mse", "jit_compile": False, **kwargs})
    return model


def accumulating(optimizer, steps):
    return lambda: tfpar.AccumulatingOptimizer(optimizer(), steps)


TWO_LOSSES = lambda: [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]


@pytest.mark.parametrize("place", ["one", "2x2", "mirrored"])
def test_outputs_with_masks_of_their_own_keep_their_denominators(place):
    """One weight for both outputs would be wrong by 1e-2 here; a pooled output counts rows."""
    data, optimizer = tokens(), lambda: O.SGD(0.3, momentum=0.9)
    whole = compiled(None, masked, optimizer, loss=TWO_LOSSES(), loss_weights=[1.0, 0.3])
    feed(whole, data, [0, 12, 24])
    model = compiled(
        strategy_for(place),
        masked,
        accumulating(optimizer, 3),
        loss=TWO_LOSSES(),
        loss_weights=[1.0, 0.3],
    )
    feed(model, data, [0, 4, 8, 12, 13, 20, 24])
    assert_close(model, whole)
    assert len(model.optimizer._held) == 2


def test_one_denominator_needs_one_accumulator():
    """Penalties on weights do not change within a window: they need none of their own."""

    def build():
        i = L.Input((None,), dtype="int32")
        z = L.Embedding(11, 8, mask_zero=True)(i)
        return keras.Model(i, L.Dense(5, kernel_regularizer="l2", name="down")(z))

    x, (y, _) = tokens()
    optimizer = lambda: O.SGD(0.3, momentum=0.9)
    kwargs = dict(loss=TWO_LOSSES()[0])
    whole = feed(compiled(None, build, optimizer, **kwargs), (x, y), [0, 12, 24])
    model = compiled(None, build, accumulating(optimizer, 2), **kwargs)
    feed(model, (x, y), [0, 5, 12, 20, 24])
    assert_close(model, whole)
    state = sum(
        v.shape.num_elements() for v in map(tf.convert_to_tensor, model.optimizer.variables)
    )
    weights = model.count_params()
    # momentum and accumulator; counter, rate, micro_step, count
    assert state == 2 * weights + 4


@pytest.mark.parametrize("place", ["one", "2x2", "mirrored"])
@pytest.mark.parametrize("penalty", [None, "l2"])
def test_sums_add_and_penalties_count_once(place, penalty):
    """A sum over rows is divided by nothing; a penalty beside it still counts once a window."""
    data, optimizer = rows(), lambda: O.SGD(0.01, momentum=0.9)
    kwargs = dict(build=dense(kernel_regularizer=penalty))
    kwargs["loss"] = keras.losses.MeanSquaredError(reduction="sum")
    whole = feed(compiled(None, optimizer=optimizer, **kwargs), data, [0, 12, 24])
    model = compiled(strategy_for(place), optimizer=accumulating(optimizer, 3), **kwargs)
    assert_close(feed(model, data, [0, 4, 7, 12, 16, 20, 24]), whole)


def random_setup(seed):
    r = np.random.default_rng(seed)
    clip = [{}, {"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}][r.integers(4)]
    average = [{}, dict(use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=2)][r.integers(2)]
    kind = [O.Adam, O.AdamW, O.RMSprop, O.Nadam, O.Lion, O.Adagrad, O.Adamax][r.integers(7)]
    scale = r.integers(3) == 0
    rate = O.schedules.ExponentialDecay(0.01, 2, 0.7) if r.integers(2) else 0.01

    def optimizer():
        inner = kind(rate, **clip, **average)
        return O.LossScaleOptimizer(inner, initial_scale=8.0) if scale else inner

    steps = int(r.integers(1, 5))
    cuts, whole = [0], [0]
    for _ in range(3):
        for _ in range(steps):
            cuts.append(cuts[-1] + int(r.integers(1, 6)))
        whole.append(cuts[-1])
    with_weights = bool(r.integers(2))
    return optimizer, steps, cuts, whole, with_weights, r


@pytest.mark.parametrize("place", ["one", "2x2"])
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 14))]
)
def test_random_windows_equal_big_batches(seed, place, float64):
    optimizer, steps, cuts, whole, with_weights, r = random_setup(seed)
    x, y = (a.astype("float64") for a in rows(whole[-1], seed))
    data = (x, y)
    loss = "mse"
    if with_weights:
        data = (x, y, r.random(len(x)) + 0.1)
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    reference = feed(compiled(None, dense(), optimizer, loss=loss), data, whole)
    model = compiled(strategy_for(place), dense(), accumulating(optimizer, steps), loss=loss)
    feed(model, data, cuts)
    assert int(model.optimizer.iterations.numpy()) == 3 and model.optimizer.has_updated
    assert_close(model, reference, 1e-9)


class AddsLoss(L.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


class Unscaled(keras.Model):
    """A train step as Keras' guides write it, without `scale_loss`."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def around(*layers, shape=(6,), kind=keras.Model):
    def build():
        i = z = L.Input(shape)
        for make in layers:
            z = make()(z)
        return kind(i, z)

    return build


def neighbours():
    r = np.random.default_rng(0)
    flat, series = r.standard_normal((24, 6)), r.standard_normal((24, 5, 6))
    series[r.random((24, 5)) < 0.3] = 0
    one, five = r.standard_normal((24, 1)), r.integers(0, 2, (24, 5)).astype(float)
    hidden, out = lambda: L.Dense(8, "tanh"), lambda: L.Dense(1)
    busy = lambda: L.Dense(4, "tanh", activity_regularizer="l2")
    several = around(hidden, lambda: L.Dense(5, "sigmoid"))
    sequence = lambda: L.LSTM(3, return_sequences=True)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy()
    weights = {0: 1.0, 1: 3.0}
    return {
        "class weights": (
            several,
            flat,
            five[:, 0],
            dict(loss=cross_entropy),
            dict(class_weight=weights),
        ),
        "2-D losses": (several, flat, five, dict(loss=lambda y, p: tf.square(y - p)), {}),
        "binary": (several, flat, five, dict(loss="binary_crossentropy"), {}),
        "add_loss": (around(hidden, AddsLoss, out), flat, one, {}, {}),
        "activity": (around(busy, out), flat, one, {}, {}),
        "activity and mask": (
            around(L.Masking, busy, sequence, shape=(5, 6)),
            series,
            series[..., :3],
            {},
            {},
        ),
        "unscaled": (around(hidden, out, kind=Unscaled), flat, one, {}, {}),
        "executions": (around(hidden, out), flat, one, dict(steps_per_execution=3), {}),
    }


@pytest.mark.parametrize("name", neighbours())
def test_neighbours_of_the_reported_faults(name, float64):
    """In float64 with SGD, whose steps show a wrong scale; windows of 3, the last one of 2."""
    build, x, y, compile_args, fit_args = neighbours()[name]
    sgd = lambda: O.SGD(0.3, momentum=0.9)
    fit_args = dict(epochs=2, shuffle=False, verbose=0, **fit_args)
    models = []
    for optimizer, batch in ((sgd, 9), (accumulating(sgd, 3), 3)):
        models.append(compiled(None, build, optimizer, **compile_args))
        models[-1].fit(x, y, batch_size=batch, **fit_args)
    assert_close(*models, 1e-12)


# ------------------------------------------------------------------ losses of one's own
class OwnLoss(keras.Model):
    """A weighted mean that Keras knows nothing of."""

    says = True

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        keep = tf.cast(tf.abs(y) < 2, y_pred.dtype)
        count = tf.reduce_sum(keep)
        loss = tf.math.divide_no_nan(tf.reduce_sum(keep * tf.square(y - y_pred)), count)
        return tfpar.weigh(loss, count) if self.says else loss


class Silent(OwnLoss):
    says = False


def own(kind):
    def build():
        plain = dense()()
        return kind(plain.inputs, plain.outputs)

    return build


@pytest.mark.parametrize("place", ["one", "data=4"])
def test_weigh_tells_what_a_loss_was_divided_by(place):
    data, adam = rows(), lambda: O.Adam(0.01)
    whole = feed(compiled(None, own(OwnLoss), adam, loss=None), data, [0, 12, 24])
    cuts = [0, 3, 12, 16, 24]
    model = compiled(strategy_for(place), own(OwnLoss), accumulating(adam, 2), loss=None)
    assert_close(feed(model, data, cuts), whole)
    silent = compiled(None, own(Silent), accumulating(adam, 2), loss=None)
    with pytest.raises(AssertionError):  # rows are not what it was divided by
        assert_close(feed(silent, data, cuts), whole)


def test_a_loss_of_ones_own_over_replicas_is_refused():
    model = compiled(strategy_for("mirrored"), own(Silent), accumulating(O.SGD, 2), loss=None)
    with pytest.raises(ValueError, match="not one of Keras' losses.*MeshStrategy"):
        feed(model, rows(), [0, 8])


def test_a_train_step_that_hides_its_losses_is_refused():
    class Hidden(keras.Model):
        def train_step(self, batch):
            x, y = batch[:2]
            losses = [keras.losses.MeanSquaredError(), keras.losses.MeanSquaredError("sum")]
            with tf.GradientTape() as tape:
                loss = sum(f(y, self(x, training=True), sample_weight=y[:, 0]) for f in losses)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    Hidden.losses_ = None
    model = compiled(None, own(Hidden), accumulating(O.SGD, 2))
    with pytest.raises(ValueError, match="2 losses of this step have denominators of their own"):
        feed(model, rows(), [0, 8])


def test_a_loop_of_ones_own_says_the_weight():
    x, y = rows()
    keras.utils.set_random_seed(0)
    model = dense()()
    start = model.get_weights()
    whole, optimizer = O.Adam(0.01), tfpar.AccumulatingOptimizer(O.Adam(0.01), 3)

    def step(optimizer, part, **kwargs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[part]) - y[part]))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights, **kwargs)

    step(whole, slice(0, 24))
    expected = model.get_weights()
    model.set_weights(start)
    for part in (slice(0, 2), slice(2, 11)):
        step(optimizer, part, weight=part.stop - part.start)
        assert not optimizer.has_updated
    assert int(optimizer.micro_step.numpy()) == 2 and optimizer.window_size == 3
    step(optimizer, slice(11, 24), weight=13)
    assert optimizer.has_updated
    assert max(relative_error(a, b) for a, b in zip(model.get_weights(), expected)) < 1e-6


# ------------------------------------------------------------------ float16
@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("place", ["one", "2x2"])
def test_an_overflow_skips_its_window_once_and_the_next_is_clean(place, mixed_float16):
    x, y = rows()
    y[2] = 6e4  # its gradient overflows
    optimizer = lambda: O.Adam(0.01)
    whole = feed(compiled(None, dense(), optimizer), (x, y), [0, 12, 24])
    model = compiled(strategy_for(place), dense(), accumulating(optimizer, 3))
    before = model.get_weights()
    assert isinstance(model.optimizer.inner_optimizer, O.LossScaleOptimizer)
    feed(model, (x, y), [0, 4, 8, 12])
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights()))
    assert float(model.optimizer.inner_optimizer.dynamic_scale.numpy()) == 2.0**14
    assert int(model.optimizer.iterations.numpy()) == 0
    feed(model, (x, y), [12, 16, 20, 24])
    assert int(model.optimizer.iterations.numpy()) == 1
    assert_close(model, whole, 2e-3)  # float16 sums differ


# ------------------------------------------------------------------ windows
def test_the_window_may_grow():
    data, adam = rows(24), lambda: O.Adam(0.01)
    whole = feed(compiled(None, dense(), adam), data, [0, 4, 12, 24])
    model = compiled(None, dense(), accumulating(adam, lambda updates: updates + 1))
    sizes = []
    for start in range(0, 24, 4):
        sizes.append(model.optimizer.window_size)
        feed(model, data, [start, start + 4])
    assert sizes == [1, 2, 2, 3, 3, 3]
    assert_close(model, whole)


@pytest.mark.parametrize("place", ["one", "2x2", "mirrored"])
def test_an_epoch_of_unknown_length_counts_no_batch_that_is_not_there(place):
    """A traced step that finds no data has run what does not depend on it: the counter once did."""
    x, y = rows(20)
    adam = lambda: O.Adam(0.01)
    whole = compiled(None, dense(), adam)
    for _ in range(2):
        feed(whole, (x, y), [0, 8, 16, 20])
    model = compiled(strategy_for(place), dense(), accumulating(adam, 2))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).filter(lambda x, y: True)
    model.fit(dataset, epochs=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 6
    assert_close(model, whole)


def test_the_tail_is_applied_before_validation_and_callbacks():
    x, y = rows(20)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append(self.model.optimizer.has_updated)

        on_epoch_end = lambda self, epoch, logs=None: self.on_test_begin()

    model = compiled(None, dense(), accumulating(O.Adam, 3))
    endless = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(4)
    for callbacks in (Look(), [Look()], keras.callbacks.CallbackList([Look()], model=model)):
        model.fit(
            endless, steps_per_epoch=5, validation_data=(x, y), verbose=0, callbacks=callbacks
        )
    assert seen == [True] * 6 and int(model.optimizer.iterations.numpy()) == 6


def test_gradients_cross_replicas_once_a_window():
    class Counting(tf.distribute.ReductionToOneDevice):
        calls = 0

        def batch_reduce_implementation(self, reduce_op, pairs, options):
            Counting.calls += sum(value.values[0].shape.rank > 0 for value, _ in pairs)
            return super().batch_reduce_implementation(reduce_op, pairs, options)

    strategy = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=Counting())
    model = compiled(strategy, dense(), accumulating(O.Adam, 4), run_eagerly=True)
    counts = []
    x, y = rows()
    for start in range(0, 24, 4):
        model.train_on_batch(x[start : start + 4], y[start : start + 4])
        counts.append(Counting.calls)
    weights = len(model.trainable_variables)
    assert counts == [0, 0, 0, weights, weights, weights]


def test_accumulators_lie_as_their_weights_do():
    model = compiled(strategy_for("2x2"), dense(), accumulating(O.Adam, 2))
    model.optimizer.build(model.trainable_variables)
    (held,) = model.optimizer._held
    for weight, accumulator in zip(model.trainable_variables, held.accumulators):
        assert accumulator.value.layout == weight.value.layout
        assert [s.shape for s in accumulator.value.shards()] == [
            s.shape for s in weight.value.shards()
        ]


def test_narrow_weights_have_wide_accumulators():
    model = compiled(None, dense(dtype="bfloat16"), accumulating(O.Adam, 2))
    model.optimizer.build(model.trainable_variables)
    assert {v.dtype for v in model.optimizer._held[0].accumulators} == {"float32"}


# ------------------------------------------------------------------ slices of a batch
@pytest.mark.parametrize("micro_batches, steps", [(3, None), (4, 2)])
def test_a_strategy_slices_the_batch_inside_the_step(micro_batches, steps):
    """23 rows in batches of 9: slices of 3, then of 5 rows in 3 slices; two outputs, masks."""
    data, optimizer = tokens(23), lambda: O.SGD(0.3, momentum=0.9)
    kwargs = dict(loss=TWO_LOSSES(), metrics=[["sparse_categorical_accuracy"], ["mae"]])
    whole = compiled(None, masked, optimizer, **kwargs)
    batch = 9 * (steps or 1)
    expected = whole.fit(*data, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    mesh = tfpar.Mesh(data=2, model=2, devices=DEVICES)
    strategy = tfpar.MeshStrategy(mesh, LAYOUTS, micro_batches=micro_batches)
    given = accumulating(optimizer, steps) if steps else optimizer
    model = compiled(strategy, masked, given, **kwargs)
    got = model.fit(*data, batch_size=9, epochs=2, shuffle=False, verbose=0).history
    assert model.optimizer.iterations.numpy() == whole.optimizer.iterations.numpy()
    assert_close(model, whole)
    for name in ("down_sparse_categorical_accuracy", "row_mae"):
        if not steps:  # metrics see the weights of their own batch
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(*data, verbose=0), whole.evaluate(*data, verbose=0), rtol=1e-4
    )
    errors = [relative_error(a, b) for a, b in zip(model.predict(data[0]), whole.predict(data[0]))]
    assert max(errors) < 1e-5


def test_a_batch_smaller_than_its_slices_and_bad_numbers_of_them():
    mesh = tfpar.Mesh(data=4, devices=DEVICES)
    strategy = tfpar.MeshStrategy(mesh, micro_batches=8)
    adam = lambda: O.Adam(0.01)
    model = feed(compiled(strategy, dense(), adam), rows(), [0, 3, 24])
    assert isinstance(model.optimizer, tfpar.AccumulatingOptimizer)
    assert_close(model, feed(compiled(None, dense(), adam), rows(), [0, 3, 24]))
    for bad in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"micro_batches.*received {bad!r}"):
            tfpar.MeshStrategy(mesh, micro_batches=bad)


# ------------------------------------------------------------------ files
def test_a_saved_model_is_the_plain_one(tmp_path):
    data, adam = rows(), lambda: O.Adam(0.01)
    plain = feed(compiled(None, dense(), adam), data, [0, 12])
    model = feed(compiled(None, dense(), accumulating(adam, 3)), data, [0, 4, 8, 12])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is O.Adam
    assert len(loaded.optimizer.variables) == len(plain.optimizer.variables)
    for again, other in ((loaded, plain), (loaded, model)):
        assert_close(again, other)
    assert_close(feed(loaded, data, [12, 24]), feed(plain, data, [12, 24]))
    feed(model, data, [12, 16])
    with pytest.warns(UserWarning, match="1 micro-batches in an open window"):
        model.save(tmp_path / "model.keras")


@pytest.mark.parametrize("place", ["one", "2x2"])
def test_a_checkpoint_resumes_inside_a_window_elsewhere(place, tmp_path):
    data, adam = rows(), lambda: O.Adam(0.01)
    kwargs = dict(build=dense(), optimizer=accumulating(adam, 3))
    whole = feed(compiled(None, dense(), adam), data, [0, 12, 24])
    first = feed(compiled(strategy_for("data=4"), **kwargs), data, [0, 4, 8, 12, 16])
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(str(tmp_path / "c"))
    second = compiled(strategy_for(place), seed=9, **kwargs)
    second.optimizer.build(second.trainable_variables)
    restored = tf.train.Checkpoint(model=second, optimizer=second.optimizer).read(path)
    restored.assert_existing_objects_matched()
    assert int(second.optimizer.micro_step.numpy()) == 1
    assert_close(feed(second, data, [16, 20, 24]), whole)


def test_resuming_with_smaller_windows_closes_an_overfull_one_at_the_next_micro_batch(tmp_path):
    data = rows()
    first = feed(compiled(None, dense(), accumulating(O.Adam, 4)), data, [0, 4, 8, 12])
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(str(tmp_path / "c"))
    second = compiled(None, dense(), accumulating(O.Adam, 2))
    second.optimizer.build(second.trainable_variables)
    tf.train.Checkpoint(model=second, optimizer=second.optimizer).read(path)
    feed(second, data, [12, 16])
    feed(first, data, [12, 16])
    assert second.optimizer.has_updated
    assert_close(second, first)


def test_its_own_config_makes_another(tmp_path):
    optimizer = tfpar.AccumulatingOptimizer(O.AdamW(0.02), 5)
    again = O.deserialize(O.serialize(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert type(again.inner_optimizer) is O.AdamW and again.window_size == 5


# ------------------------------------------------------------------ refusals
@pytest.mark.parametrize("steps", [0, -2, 1.5, True])
def test_windows_that_make_no_sense_are_refused(steps):
    with pytest.raises(ValueError, match=f"steps must be a whole number.*received {steps!r}"):
        tfpar.AccumulatingOptimizer("adam", steps)


def test_two_ways_to_accumulate_are_refused():
    with pytest.raises(ValueError, match="AccumulatingOptimizer already"):
        tfpar.AccumulatingOptimizer(tfpar.AccumulatingOptimizer("adam", 2), 2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3 of its own"):
        tfpar.AccumulatingOptimizer(O.Adam(gradient_accumulation_steps=3), 2)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=3 of its own"):
        inner = O.LossScaleOptimizer(O.Adam(gradient_accumulation_steps=3))
        tfpar.AccumulatingOptimizer(inner, 2)


def test_loss_scaling_outside_is_refused():
    with pytest.raises(ValueError, match="nest them the other way round"):
        O.LossScaleOptimizer(tfpar.AccumulatingOptimizer("adam", 2))


@pytest.mark.parametrize("place", ["2x2", "mirrored"])
def test_an_optimizer_from_outside_the_scope_is_refused(place):
    outside = tfpar.AccumulatingOptimizer(O.Adam(), 2)
    with scope(strategy_for(place)):
        model = dense()()
        model.compile(outside, "mse")
    with pytest.raises(ValueError, match="created outside"):
        feed(model, rows(), [0, 8])


def test_losses_that_part_are_refused_in_eager_steps():
    kwargs = dict(loss=TWO_LOSSES(), run_eagerly=True)
    model = compiled(None, masked, accumulating(O.Adam, 2), **kwargs)
    with pytest.raises(ValueError, match="Leave run_eagerly out"):
        feed(model, tokens(), [0, 8])
