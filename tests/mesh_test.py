"""Mesh: degrees, devices, coordinates, stages, and clear errors."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfpar
from tfpar.variables import to_host, to_mesh


def test_takes_all_devices_by_default():
    mesh = tfpar.Mesh(data=4, model=2)
    assert mesh.size == 8
    assert mesh.shape == {"pipe": 1, "data": 4, "model": 2}
    assert mesh.axis_names == ("pipe", "data", "model")
    assert mesh.device_type == "CPU"


def test_devices_stand_in_row_major_order():
    mesh = tfpar.Mesh(pipe=2, data=2, model=2)
    places = [tuple(mesh.coordinates(f"CPU:{i}").values()) for i in range(8)]
    assert places == list(np.ndindex(2, 2, 2))


@pytest.mark.parametrize("spell", ["CPU:{}", "cpu:{}", "/cpu:{}", "/device:CPU:{}", "/CPU:{}"])
def test_takes_every_spelling_of_a_device(spell):
    names = [spell.format(i) for i in (3, 1)]
    assert tfpar.Mesh(data=2, devices=names) == tfpar.Mesh(data=2, devices=["CPU:3", "CPU:1"])


def test_takes_logical_devices():
    devices = tf.config.list_logical_devices("CPU")[:2]
    assert tfpar.Mesh(model=2, devices=devices) == tfpar.Mesh(model=2, devices=["CPU:0", "CPU:1"])


def test_stages_divide_the_devices():
    stages = tfpar.Mesh(pipe=2, data=2, model=2).stages
    assert [s.shape for s in stages] == [{"pipe": 1, "data": 2, "model": 2}] * 2
    assert stages[1] == tfpar.Mesh(data=2, model=2, devices=[f"CPU:{i}" for i in (4, 5, 6, 7)])


def test_prints_as_a_table_of_devices_and_coordinates():
    text = str(tfpar.Mesh(data=2, model=2, devices=[f"CPU:{i}" for i in (0, 1, 2, 5)]))
    first, head, *rows = text.splitlines()
    assert "data=2" in first and "4 CPU device(s)" in first
    assert head.split() == ["device", "pipe", "data", "model"]
    assert rows[3].split() == ["CPU:5", "0", "1", "1"]


def test_equal_meshes_are_equal_and_hash_alike():
    assert hash(tfpar.Mesh(data=8)) == hash(tfpar.Mesh(data=8))
    assert tfpar.Mesh(data=8) != tfpar.Mesh(model=8)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (dict(data=3), ["needs 3 devices", "received 8", "data=2 model=4", "virtual_devices(3)"]),
        (dict(data=0), ["data must be a positive int", "data=0"]),
        (dict(model=2.0), ["model must be a positive int", "2.0"]),
        (dict(pipe=True), ["pipe must be a positive int", "True"]),
        (dict(data=2, devices=["CPU:0", "/cpu:0"]), ["twice", "CPU:0"]),
        (dict(data=2, devices=["CPU:0", "CPU:9"]), ["unknown device 'CPU:9'", "CPU:7"]),
        (dict(data=2, devices=["CPU:0", "GPU:0"]), ["unknown device 'GPU:0'"]),
        (dict(data=2, devices=["CPU:0", 1]), ["unknown device 1"]),
        (dict(data=2, devices="CPU:0"), ["devices must be a list", "CPU:0"]),
    ],
)
def test_bad_meshes_are_refused(kwargs, words):
    with pytest.raises(ValueError) as error:
        tfpar.Mesh(**kwargs)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "8", None])
def test_bad_numbers_of_virtual_devices_are_refused(n):
    with pytest.raises(ValueError, match="positive int"):
        tfpar.virtual_devices(n)


def test_virtual_devices_after_the_start_says_what_to_do():
    tf.constant(0)
    tfpar.virtual_devices(8)  # what it has already
    with pytest.raises(RuntimeError, match=r"too late.*8 CPU device.*restart the kernel"):
        tfpar.virtual_devices(4)


def test_without_virtual_devices_there_is_one():
    code = "import tfpar; print(tfpar.Mesh().devices)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.count("CPU:0") == 1, done.stderr


ORDERS = {"natural": [0, 1, 2, 3], "shuffled": [2, 0, 3, 1], "with gaps": [6, 1, 7, 4]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data, model", [(4, 1), (2, 2), (1, 4)])
def test_every_relayout_keeps_the_value_in_any_order_of_devices(order, data, model):
    """DTensor's all-to-all mixed shards up, silently, where devices did not stand in order."""
    mesh = tfpar.Mesh(data=data, model=model, devices=[f"CPU:{i}" for i in ORDERS[order]])
    tfpar.MeshStrategy(mesh)
    x = np.arange(8 * 12, dtype="float32").reshape(8, 12)
    layouts = [(a, b) for a in (None, "data", "model") for b in (None, "data", "model")]
    layouts = [axes for axes in layouts if axes[0] is None or axes[0] != axes[1]]
    for before in layouts:
        packed = to_mesh(x, mesh.layout(before))
        np.testing.assert_array_equal(to_host(packed), x)
        for after in layouts:
            moved = dtensor.relayout(packed, mesh.layout(after))
            np.testing.assert_array_equal(to_host(moved), x, err_msg=f"{before} -> {after}")


def test_relayouts_on_more_than_ten_devices_work():
    """DTensor's all-to-all ran the numbers of devices together in its keys: 1, 12 and 11, 2."""
    code = """
import numpy as np, tfpar
from tensorflow.experimental import dtensor
from tfpar.variables import to_host, to_mesh
tfpar.virtual_devices(16)
mesh = tfpar.Mesh(data=16)
tfpar.MeshStrategy(mesh)
x = np.arange(16 * 32).reshape(16, 32)
for _ in range(3):
    moved = dtensor.relayout(to_mesh(x, mesh.layout(("data", None))), mesh.layout((None, "data")))
    assert (to_host(moved).numpy() == x).all()
print("right")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "right" in done.stdout, done.stderr
