"""An unchanged Keras script under `with strategy.scope()`: everything it may do, on a 2x2 mesh.

Each test runs the same script without a strategy and under one, and compares what comes out.
"""

import contextlib
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar

L = keras.layers
RULES = {
    r"up/kernel": (None, "model"),
    r"up/bias": ("model",),
    r"down/kernel": ("model", None),
}


def mesh(data=1, model=1, pipe=1):
    """A mesh of the first pipe x data x model devices."""
    devices = [f"CPU:{i}" for i in range(pipe * data * model)]
    return tfpar.Mesh(pipe=pipe, data=data, model=model, devices=devices)


def mirrored(replicas=4, **kwargs):
    return tfpar.MirroredStrategy([f"CPU:{i}" for i in range(replicas)], **kwargs)


def strategy_on(data, model, layouts=None, **kwargs):
    return tfpar.MeshStrategy(mesh(data, model), layouts, **kwargs)


def two_by_two(layouts=None):
    return strategy_on(2, 2, layouts)


def scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def mlp(inputs=6, outputs=1):
    keras.utils.set_random_seed(3)
    i = keras.Input((inputs,))
    z = L.Dense(8, activation="gelu", name="up")(i)
    z = L.LayerNormalization()(L.Dense(10, name="down")(z))
    return keras.Model(i, L.Dense(outputs, name="head")(z))


def data(rows=26, inputs=6, seed=0):
    r = np.random.default_rng(seed)
    x = r.standard_normal((rows, inputs)).astype("float32")
    return x, (x[:, :1] * 2 + r.standard_normal((rows, 1))).astype("float32")


def compiled(strategy, build=mlp, optimizer=None, **kwargs):
    with scope(strategy):
        model = build()
        kwargs = {"loss": "mse", **kwargs}
        model.compile(optimizer=(optimizer or (lambda: keras.optimizers.Adam(0.01)))(), **kwargs)
    return model


def both(script, layouts=RULES):
    """What `script(strategy)` gives on one device and on the mesh."""
    out = []
    for strategy in (None, two_by_two(layouts)):
        keras.utils.set_random_seed(5)
        out.append(script(strategy))
    return out


def assert_close(a, b, tolerance=3e-5):
    flat_a, flat_b = tf.nest.flatten(a), tf.nest.flatten(b)
    assert len(flat_a) == len(flat_b)
    for u, v in zip(flat_a, flat_b):
        u, v = np.asarray(u), np.asarray(v)
        assert u.shape == v.shape
        assert np.max(np.abs(u - v) / (1 + np.abs(v)), initial=0) < tolerance, (u, v)


def assert_same(script, layouts=RULES, tolerance=3e-5):
    assert_close(*both(script, layouts), tolerance)


# ------------------------------------------------------------------ inputs
def _sources():
    x, y = data()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return x[7 * i : 7 * i + 7], y[7 * i : 7 * i + 7]

    def generator():
        for i in range(8):
            j = i % 4
            yield x[7 * j : 7 * j + 7], y[7 * j : 7 * j + 7]

    def dataset():
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    return {
        "numpy": lambda m: m.fit(x, y, batch_size=8, epochs=2, verbose=0),
        "numpy shuffled": lambda m: m.fit(x, y, batch_size=5, epochs=2, shuffle=True, verbose=0),
        "tensors": lambda m: m.fit(tf.constant(x), tf.constant(y), epochs=2, verbose=0),
        "tf.data": lambda m: m.fit(dataset(), epochs=2, verbose=0),
        "tf.data shuffled": lambda m: m.fit(dataset().shuffle(9, seed=1), epochs=2, verbose=0),
        "endless tf.data": lambda m: m.fit(
            dataset().repeat(), epochs=2, steps_per_epoch=3, verbose=0
        ),
        "PyDataset": lambda m: m.fit(Batches(), epochs=2, verbose=0),
        "generator": lambda m: m.fit(generator(), epochs=2, steps_per_epoch=4, verbose=0),
        "smaller than the axis": lambda m: m.fit(x[:5], y[:5], batch_size=1, verbose=0),
        "validation data": lambda m: m.fit(
            x, y, validation_data=(x[:9], y[:9]), epochs=2, verbose=0
        ),
        "validation split": lambda m: m.fit(x, y, validation_split=0.3, epochs=2, verbose=0),
        "sample weight": lambda m: m.fit(
            x, y, sample_weight=np.linspace(0, 2, len(x)).astype("float32"), verbose=0
        ),
    }


@pytest.mark.parametrize("source", _sources())
def test_every_kind_of_input(source):
    def script(strategy):
        model = compiled(strategy, metrics=["mae"])
        history = _sources()[source](model).history
        return history, model.get_weights()

    assert_same(script)


def test_class_weight():
    r = np.random.default_rng(1)
    x, y = r.standard_normal((22, 6)).astype("float32"), r.integers(0, 3, 22)

    def script(strategy):
        model = compiled(
            strategy,
            lambda: mlp(outputs=3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        history = model.fit(x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.2}, epochs=2, verbose=0)
        return history.history, model.get_weights()

    assert_same(script)


def test_dicts_in_and_out_with_weights_and_masks():
    r = np.random.default_rng(2)
    x = {
        "ids": r.integers(0, 7, (24, 5)).astype("int32"),
        "num": r.standard_normal((24, 4)).astype("float32"),
    }
    y = {
        "a": r.standard_normal((24, 1)).astype("float32"),
        "b": r.integers(0, 3, (24, 5)).astype("int32"),
    }
    weights = {"a": r.random(24).astype("float32"), "b": np.ones((24, 5), "float32")}

    def build():
        keras.utils.set_random_seed(3)
        ids, num = keras.Input((5,), dtype="int32", name="ids"), keras.Input((4,), name="num")
        z = L.Embedding(7, 6, mask_zero=True)(ids)
        z = L.Dense(8, activation="tanh", name="up")(z)
        pooled = L.Concatenate()([L.GlobalAveragePooling1D()(z), num])
        return keras.Model(
            {"ids": ids, "num": num},
            {"a": L.Dense(1, name="a")(pooled), "b": L.Dense(3, name="b")(z)},
        )

    def script(strategy):
        model = compiled(
            strategy,
            build,
            loss={
                "a": "mse",
                "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            },
            loss_weights={"a": 0.7, "b": 1.3},
            metrics={"a": ["mae"], "b": ["sparse_categorical_accuracy"]},
        )
        history = model.fit(x, y, sample_weight=weights, batch_size=8, epochs=2, verbose=0)
        return history.history, model.get_weights(), model.predict(x, verbose=0)

    assert_same(script, {r"up/kernel": (None, "model"), r"up/bias": ("model",)})


def test_sequence_lengths_that_change():
    r = np.random.default_rng(2)
    batches = [
        (r.integers(0, 9, (n, t)), r.standard_normal((n, t, 1)).astype("float32"))
        for n, t in ((4, 5), (4, 9), (3, 2))
    ]

    def build():
        keras.utils.set_random_seed(3)
        i = keras.Input((None,), dtype="int32")
        z = L.Embedding(9, 6)(i)
        z = z + L.MultiHeadAttention(2, 3)(z, z, use_causal_mask=True)
        return keras.Model(i, L.Dense(1)(L.LSTM(4, return_sequences=True)(z)))

    def script(strategy):
        model = compiled(strategy, build)
        losses = [model.train_on_batch(*b) for b in batches * 2]
        return losses, [model.predict_on_batch(b[0]) for b in batches]

    assert_same(script, None)


# ------------------------------------------------------------------ methods
def test_methods_on_batches_and_calls_on_plain_tensors():
    x, y = data()

    def script(strategy):
        model = compiled(strategy, metrics=["mae"])
        out = [
            model.train_on_batch(x[:8], y[:8], return_dict=True),
            model.train_on_batch(x[:7], y[:7], sample_weight=np.arange(7.0, dtype="float32")),
            model.test_on_batch(x[:8], y[:8]),
            model.predict_on_batch(x[:5]),
            model(x[:5]),
            model(tf.constant(x[:5]), training=True),
            model.evaluate(x, y, verbose=0, return_dict=True),
            model.predict(x, batch_size=7, verbose=0),
        ]
        return out

    assert_same(script)


def test_predict_with_several_steps_per_execution():
    x, y = data()

    def script(strategy):
        model = compiled(strategy, steps_per_execution=3)
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        return history.history, model.predict(x, batch_size=4, verbose=0), model.get_weights()

    assert_same(script)


def test_run_eagerly():
    x, y = data(12)

    def script(strategy):
        model = compiled(strategy, run_eagerly=True, metrics=["mae"])
        history = model.fit(x, y, batch_size=4, verbose=0)
        return history.history, model.predict(x, verbose=0), model.get_weights()

    assert_same(script)


def test_custom_train_step_and_compute_loss():
    x, y = data()

    class Custom(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.abs(y - y_pred)) + sum(self.losses)

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss, "norm": tf.linalg.global_norm(gradients)}

    def build():
        keras.utils.set_random_seed(3)
        i = keras.Input((6,))
        z = L.Dense(8, kernel_regularizer="l2", activity_regularizer="l1", name="up")(i)
        return Custom(i, L.Dense(1)(z))

    def script(strategy):
        model = compiled(strategy, build, loss=None)
        return model.fit(x, y, batch_size=8, epochs=2, verbose=0).history, model.get_weights()

    assert_same(script, {r"up/kernel": (None, "model"), r"up/bias": ("model",)})


def test_a_training_loop_of_ones_own():
    """strategy.run takes plain tensors and gives plain tensors; tapes outside it work too."""
    x, y = data(8)

    def script(strategy):
        model = compiled(strategy)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((model(x, training=True) - y) ** 2)
            model.optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
            return loss

        losses = []
        for _ in range(2):
            losses.append(strategy.run(step, args=(x, y)) if strategy else step(x, y))
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return losses, gradients, tf.function(lambda x: model(x))(tf.constant(x))

    assert_same(script)


# ------------------------------------------------------------------ model features
def test_regularisers_constraints_frozen_layers_batch_norm_several_losses():
    x, y = data(24)

    def build():
        keras.utils.set_random_seed(3)
        i = keras.Input((6,))
        z = L.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.5), name="up")(i)
        z = L.BatchNormalization(momentum=0.7)(z)
        frozen = L.Dense(8, name="frozen", trainable=False)
        z = L.Dense(4, activity_regularizer=keras.regularizers.L2(0.1), name="down")(frozen(z))
        return keras.Model(i, [L.Dense(1)(z), L.Dense(1)(z)])

    def script(strategy):
        model = compiled(strategy, build, loss=["mse", "huber"], optimizer=keras.optimizers.RMSprop)
        history = model.fit(x, [y, y], batch_size=8, epochs=2, verbose=0)
        return history.history, model.evaluate(x, [y, y], verbose=0)

    assert_same(script, {r"up/kernel": (None, "model"), r"down/kernel": ("model", None)}, 1e-4)


def test_split_convolution_filters_are_gathered_for_use():
    r = np.random.default_rng(0)
    x, y = r.standard_normal((8, 8, 8, 4)).astype("float32"), data(8)[1]

    def build():
        keras.utils.set_random_seed(3)
        i = keras.Input((8, 8, 4))
        z = L.Conv2D(6, 3, activation="tanh", name="conv")(i)
        return keras.Model(i, L.Dense(1)(L.GlobalMaxPooling2D()(z)))

    def script(strategy):
        model = compiled(strategy, build)
        model.fit(x, y, batch_size=4, epochs=2, verbose=0)
        if strategy:
            shard = model.get_layer("conv").kernel.value.shards()[0]
            assert shard.shape == (3, 3, 4, 3)
        return model.get_weights()

    assert_same(script, {r"conv/kernel": (None, None, None, "model"), r"conv/bias": ("model",)})


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    x, y = data(24)

    def script(strategy):
        keras.config.set_dtype_policy(policy)
        try:
            model = compiled(strategy)
            history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
            if policy == "mixed_float16":
                assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        finally:
            keras.config.set_dtype_policy("float32")
        return history.history, model.get_weights()

    assert_same(script, tolerance=2e-2)


def test_an_overflow_skips_the_update_and_halves_the_scale():
    x, y = data(8)
    x = np.full_like(x, 3e4)

    def script(strategy):
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = compiled(strategy)
            before = model.get_weights()
            model.train_on_batch(x, y)
            assert_close(before, model.get_weights(), 1e-12)
            return float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))
        finally:
            keras.config.set_dtype_policy("float32")

    assert_same(script)


# ------------------------------------------------------------------ callbacks
def test_the_usual_callbacks(tmp_path):
    x, y = data(24)

    def script(strategy):
        where = tmp_path / ("mesh" if strategy else "one")
        model = compiled(strategy, metrics=["mae"])
        callbacks = [
            keras.callbacks.ModelCheckpoint(where / "best.keras", save_best_only=True),
            keras.callbacks.ModelCheckpoint(where / "w.weights.h5", save_weights_only=True),
            keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
            keras.callbacks.TensorBoard(where / "tb", histogram_freq=1, update_freq="batch"),
            keras.callbacks.CSVLogger(where / "log.csv"),
            keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5, min_delta=10),
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.9),
            keras.callbacks.TerminateOnNaN(),
        ]
        os.makedirs(where, exist_ok=True)
        history = model.fit(
            x, y, validation_split=0.25, epochs=4, callbacks=callbacks, batch_size=6, verbose=0
        )
        best = keras.models.load_model(where / "best.keras")
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        return history.history, model.get_weights(), best.predict(x, verbose=0), rate

    assert_same(script, tolerance=1e-4)


def test_backup_and_restore_goes_on_where_it_stopped(tmp_path):
    x, y = data(24)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def script(strategy):
        where = str(tmp_path / ("mesh" if strategy else "one"))
        model = compiled(strategy)
        backup = keras.callbacks.BackupAndRestore(where)
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, epochs=4, shuffle=False, callbacks=[backup, Stop()], verbose=0)
        again = compiled(strategy)
        history = again.fit(
            x,
            y,
            epochs=4,
            shuffle=False,
            callbacks=[keras.callbacks.BackupAndRestore(where)],
            verbose=0,
        )
        assert len(history.history["loss"]) == 2
        return history.history, again.get_weights()

    assert_same(script)
