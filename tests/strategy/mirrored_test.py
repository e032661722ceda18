"""The replica view equals one device: layers, optimizers, losses, uneven batches, own loops."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_test import mirrored

import tfpar
from tfpar.strategy import cross_device
from tfpar.testing import assert_same_training, relative_error

L = keras.layers


def images(rows=22):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 6, 6, 2)), random.integers(0, 3, rows)


def of_layers(*layers):
    return lambda: keras.Sequential([L.Input((6, 6, 2)), *(make() for make in layers), L.Dense(3)])


LAYERS = {
    "depthwise": (lambda: L.DepthwiseConv2D(3), lambda: L.AveragePooling2D(2), L.Flatten),
    "lstm": (lambda: L.Reshape((6, 12)), lambda: L.LSTM(5)),
    "gru": (lambda: L.Reshape((6, 12)), lambda: L.Bidirectional(L.GRU(4))),
    "synchronised": (
        lambda: L.Conv2D(4, 3),
        lambda: L.BatchNormalization(synchronized=True),
        L.Flatten,
    ),
    "regularised": (
        L.Flatten,
        lambda: L.Dense(
            5, kernel_regularizer="l2", activity_regularizer="l2", bias_regularizer="l1"
        ),
    ),
}


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_a_mesh_cannot_split_or_must_share(name, float64):
    assert_same_training(
        of_layers(*LAYERS[name]),
        images(),
        mirrored(),
        optimizer=lambda: keras.optimizers.Adam(0.01),
        loss=sparse(),
        metrics=["accuracy"],
        batch_size=8,
        epochs=2,
        tolerance=1e-9,
    )


OPTIMIZERS = {
    "clipped": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.1),
    "globally clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "averaging": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: tfpar.AccumulatingOptimizer(keras.optimizers.AdamW(0.01), 2),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, float64):
    assert_same_training(
        of_layers(L.Flatten, lambda: L.Dense(5, "tanh")),
        images(),
        mirrored(3, bucket_bytes=100),
        optimizer=OPTIMIZERS[name],
        loss=sparse(),
        batch_size=7,
        epochs=2,
        use_fit=True,
        tolerance=1e-9,
    )


@pytest.mark.parametrize("rows", [1, 3, 4, 5])
def test_batches_smaller_than_the_replicas(rows, float64):
    """A replica without rows must add nothing, neither NaN nor a share of the mean."""
    assert_same_training(
        of_layers(L.Flatten, lambda: L.Dense(5, "tanh")),
        images(11),
        mirrored(),
        loss=sparse(),
        metrics=["accuracy"],
        batch_size=rows,
        tolerance=1e-9,
    )


def test_a_loop_of_ones_own_changes_one_line():
    """As written for tf.distribute.MirroredStrategy: distributed data, run, reduce."""
    x, y = (a.astype("float32") for a in images(24))

    def train(strategy):
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = of_layers(L.Flatten)()
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
            loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def step(batch):
            x, y = batch
            with tf.GradientTape() as tape:
                each = loss_fn(y, model(x, training=True))
                loss = tf.nn.compute_average_loss(each, global_batch_size=8)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        @tf.function
        def distributed(batch):
            return strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None)

        losses = [distributed(batch) for batch in strategy.experimental_distribute_dataset(dataset)]
        return [*losses, *model.get_weights()]

    assert relative_error(train(mirrored()), train(tf.distribute.get_strategy())) < 1e-5


def test_lives_in_one_process_with_others():
    """Several sizes, and a mesh: collectives must not take each other's keys."""
    for strategy in (
        mirrored(2),
        tfpar.MeshStrategy(tfpar.Mesh(data=4, devices=[f"CPU:{i}" for i in range(4)])),
        mirrored(4),
        mirrored(3),
        mirrored(2),
    ):
        assert_same_training(of_layers(L.Flatten), images(), strategy, loss=sparse(), batch_size=12)


def test_a_layer_that_adds_a_loss_says_what_it_is():
    class Shrink(L.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    build = of_layers(L.Flatten, Shrink)
    with pytest.raises(ValueError, match="adds a loss of its own.*loss_is"):
        assert_same_training(build, images(), mirrored(), loss=sparse())
    strategy = mirrored(loss_is="mean")
    assert_same_training(build, images(), strategy, loss=sparse(), batch_size=7)


@pytest.mark.parametrize(
    "kwargs", [dict(loss_is="sum"), dict(bucket_bytes=0), dict(bucket_bytes=2.5)]
)
def test_bad_arguments(kwargs):
    with pytest.raises(ValueError, match="received"):
        mirrored(**kwargs)


def test_buckets_close_when_they_are_full():
    sizes = [("f", 30), ("d", 80), ("f", 80), ("f", 10), ("d", 30), ("f", 200)]
    assert cross_device.fill_buckets(sizes, 100) == [[0, 2], [1, 4], [3, 5]]
    assert cross_device.fill_buckets(sizes, 1) == [[i] for i in range(6)]
    assert cross_device.fill_buckets(sizes, 1000) == [[0, 2, 3, 5], [1, 4]]
    assert cross_device.fill_buckets([], 10) == []


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_one_collective_a_bucket(bucket_bytes):
    strategy = mirrored(bucket_bytes=bucket_bytes)
    with strategy.scope():
        model = of_layers(L.Flatten, lambda: L.Dense(5))()
        model.compile("adam", sparse())
    x, y = images(8)
    model.train_on_batch(x, y)
    sizes = [(None, v.shape.num_elements() * 4) for v in model.trainable_variables[::-1]]
    want = len(cross_device.fill_buckets(sizes, bucket_bytes))
    assert len(strategy._wire.traffic) == want
    assert sum(size for _, _, size in strategy._wire.traffic) == sum(size for _, size in sizes)
