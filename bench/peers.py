"""Who trains: each peer says how its process starts and what its model is built under."""

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way to train the same model.

    Attributes:
      scope: layouts -> the context in which the model is built and compiled.
      local_size: Keras variable -> how many of its elements the fullest device holds.
      backend: the Keras backend.
      devices: how many devices the process sees.
      parts: into how many micro-batches the batch is cut, each a step of its own.
      optimizer: wraps the optimizer.
      build: takes the function that builds the model, returns the model.
    """

    scope: Callable
    local_size: Callable
    backend: str = "tensorflow"
    devices: int = 1
    parts: int = 1
    optimizer: Callable = lambda optimizer: optimizer
    build: Callable = lambda build: build()

    def missing(self):
        """Why this peer cannot run here, or None."""
        if importlib.util.find_spec(self.backend) is None:
            return f"{self.backend} is not installed"
        return None

    def prepare(self):
        """Sets the environment up; called in the peer's process before Keras is imported."""
        os.environ["KERAS_BACKEND"] = self.backend
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        if self.backend == "jax":
            os.environ["JAX_PLATFORMS"] = "cpu"
            flag = f"--xla_force_host_platform_device_count={self.devices}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def whole(variable):
    return math.prod(variable.shape)


# Plain Keras on TensorFlow or JAX, on one device with all its threads.


def plain(layouts):
    return contextlib.nullcontext()


# tf.distribute.MirroredStrategy: a copy of all variables on every device.


def mirrored(layouts):
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)]).scope()


# Keras' own distribution on JAX.


def jax_data(layouts):
    import keras

    return keras.distribution.DataParallel().scope()


def jax_model(layouts):
    import keras

    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    for pattern, axes in layouts.items():
        layout_map[f".*{pattern}"] = axes  # Keras matches the whole path
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch").scope()


def jax_shard(variable):
    return math.prod(variable.value.sharding.shard_shape(tuple(variable.shape)))


# tfpar.


def mesh(data=1, model=1, pipe=1, more_layouts=None, **kwargs):
    def scope(layouts):
        import tfpar

        tfpar.virtual_devices(pipe * data * model)
        mesh = tfpar.Mesh(pipe=pipe, data=data, model=model)
        layouts = {**layouts, **(more_layouts or {})}
        return tfpar.MeshStrategy(mesh, layouts, **kwargs).scope()

    return Peer(scope, largest_shard, devices=pipe * data * model)


def largest_shard(variable):
    return max(math.prod(shard.shape) for shard in variable.value.shards())


def accumulating(optimizer):
    import tfpar

    return tfpar.AccumulatingOptimizer(optimizer, PARTS)


def pipeline(pipe, data=1, **kwargs):
    def build(build):
        import tfpar

        return tfpar.Pipeline(build, micro_batches=MICRO_BATCHES, **kwargs)

    return dataclasses.replace(mesh(pipe=pipe, data=data), build=build)


def stock_accumulation(optimizer):
    optimizer.gradient_accumulation_steps = MICRO_BATCHES
    return optimizer


PARTS = 8
MICRO_BATCHES = 16

PEERS = {
    "plain": Peer(plain, whole),
    "mirrored data=4": Peer(mirrored, whole, devices=4),
    "jax": Peer(plain, whole, backend="jax"),
    "jax data=4": Peer(jax_data, jax_shard, backend="jax", devices=4),
    "jax model=4": Peer(jax_model, jax_shard, backend="jax", devices=4),
    "tfpar data=4": mesh(data=4),
    "tfpar model=4": mesh(model=4),
    "tfpar data=2 model=2": mesh(data=2, model=2),
}

# For gradient accumulation: the whole batch in one step is "plain".
PARTED = {
    "micro-batch": Peer(plain, whole, parts=PARTS),
    "accumulating": Peer(plain, whole, parts=PARTS, optimizer=accumulating),
    "tfpar": mesh(),
    f"tfpar micro_batches={PARTS}": mesh(micro_batches=PARTS),
}

# For ZeRO, beside "tfpar data=4".
ZERO = {f"tfpar data=4 zero={stage}": mesh(data=4, zero=stage) for stage in (1, 2, 3)}

# For the workload "vocabulary", beside "tfpar model=4": logits gathered before the loss.
GATHERED = {
    "tfpar model=4 gathered": mesh(model=4, more_layouts={"logits/output": ("data", None, None)}),
}

# For pipelines: the same micro-batches with Keras' own accumulation on one device.
PIPED = {
    f"plain {MICRO_BATCHES} micro-batches": Peer(
        plain, whole, parts=MICRO_BATCHES, optimizer=stock_accumulation
    ),
    "tfpar pipe=4": pipeline(4, recompute=False),
    "tfpar pipe=4 recompute": pipeline(4),
    "tfpar pipe=4 gpipe": pipeline(4, schedule="gpipe", recompute=False),
    "tfpar pipe=4 interleaved": pipeline(4, schedule="interleaved", recompute=False),
    "tfpar pipe=2 data=2": pipeline(2, 2, recompute=False),
}
ALL = {**PEERS, **PARTED, **ZERO, **GATHERED, **PIPED}
