"""What every device holds is exactly what the layouts say."""

import math

import keras
import numpy as np
import pytest
from fit_test import strategy_on
from matrix_test import TRANSFORMER_LAYOUTS, sentences, transformer
from tensorflow.experimental import dtensor

import tfpar
from tfpar.layouts import bytes_per_device


def bytes_held(variables, mesh):
    """What each device of the mesh holds of Keras variables, each shard on its device."""
    held = np.zeros(mesh.size, int)
    for variable in variables:
        for k, shard in enumerate(variable.value.shards()):
            assert shard.device == mesh.devices[k]
            held[k] += math.prod(shard.shape) * shard.dtype.size
    return held


@pytest.mark.parametrize("data, model", [(4, 1), (1, 4), (2, 2), (4, 2)])
def test_bytes_of_variables_equal_the_formula(data, model):
    """Weights and both Adam slots: sum of 4 bytes x elements / degrees of the axes that split them."""
    strategy = strategy_on(data, model, TRANSFORMER_LAYOUTS)
    mesh = strategy.mesh
    with strategy.scope():
        network = transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("adam", loss)
    network.fit(*sentences(8), verbose=0)

    want = 0
    for weight in network.trainable_variables:
        axes = strategy.layouts.lookup(weight.path, tuple(weight.shape), mesh)
        split = math.prod(mesh.shape[axis] for axis in axes if axis)
        want += 3 * 4 * math.prod(weight.shape) // split
        assert bytes_per_device(tuple(weight.shape), 4, axes, mesh) * split == 4 * math.prod(
            weight.shape
        )
    scalars = {"iterations": 8, "learning_rate": 4}
    want += sum(scalars.values())

    variables = network.trainable_variables + network.optimizer.variables
    np.testing.assert_array_equal(bytes_held(variables, mesh), want)


def test_a_device_receives_its_own_slice_of_a_batch_only():
    strategy = tfpar.MeshStrategy(tfpar.Mesh(data=4, model=2))
    x = np.arange(16 * 3, dtype="float32").reshape(16, 3)
    for k, part in enumerate(dtensor.unpack(strategy.pack(x))):
        np.testing.assert_array_equal(part, x[k // 2 * 4 : k // 2 * 4 + 4])
