"""A mesh: named axes over devices."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

AXES = ("pipe", "data", "model")


def virtual_devices(n):
    """Splits the CPU into `n` logical devices, to try out and test meshes without accelerators.

    Call it before TensorFlow starts, that is before any tensor, variable or dataset is made.
    The devices share the cores of the machine: they are for tests, not for speed.

    Args:
      n: how many devices, a positive int.

    Raises:
      ValueError: not a positive int.
      RuntimeError: TensorFlow has started already with another number of CPU devices.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"the number of virtual devices must be a positive int; received {n!r}")
    cpu = tf.config.list_physical_devices("CPU")[0]
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * n
        )
    except RuntimeError:
        have = len(tf.config.list_logical_devices("CPU"))
        if have != n:
            raise RuntimeError(
                f"virtual_devices({n}) came too late: TensorFlow has already started with {have} "
                "CPU device(s). Call it before any tensor, variable or dataset is made; in a "
                "notebook, restart the kernel and make it the first call"
            ) from None


def check_positive(**numbers):
    """Refuses what is no positive int.

    Raises:
      ValueError: names the argument and its value.
    """
    for name, value in numbers.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a positive int; received {name}={value!r}")


def aligned(rows, right=()):
    """The lines of a table.

    Args:
      rows: sequences of cells, strings, one for each column.
      right: the columns that are aligned on their right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if k in right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


@dataclasses.dataclass(frozen=True, eq=True)
class Mesh:
    """Devices arranged along the axes `pipe`, `data` and `model`.

    Args:
      data: degree of data parallelism: into how many slices a batch is cut.
      model: degree of tensor parallelism: into how many shards a weight may be cut.
      pipe: number of pipeline stages.
      devices: TensorFlow's names ("CPU:0", "/device:GPU:1") or `tf.config.LogicalDevice`s, in
        row-major order of (pipe, data, model); by default all TPUs or GPUs, else all CPU devices.

    Raises:
      ValueError: a degree that is no positive int, degrees whose product is not the number of
        devices, an unknown device, a device given twice, devices of several types.
    """

    data: int = 1
    model: int = 1
    pipe: int = 1
    devices: Any = None  # a tuple of full device names, once made

    def __post_init__(self):
        check_positive(**self.shape)
        for axis, degree in self.shape.items():
            object.__setattr__(self, axis, int(degree))
        known = tf.config.list_logical_devices()
        if self.devices is None:
            devices = _default_devices(known)
        elif isinstance(self.devices, str):
            raise ValueError(f"devices must be a list of devices; received {self.devices!r}")
        else:
            devices = tuple(_find(device, known) for device in self.devices)
        object.__setattr__(self, "devices", devices)
        self._check(devices)

    def _check(self, devices):
        twice = sorted({d for d in devices if devices.count(d) > 1})
        if twice:
            raise ValueError(f"each device may stand in a mesh once; received twice: {twice}")
        types = sorted({_type(d) for d in devices})
        if len(types) > 1:
            raise ValueError(f"the devices of a mesh must be of one type; received {types}")
        if len(devices) == self.pipe * self.data * self.model:
            return
        way_out = f"Degrees that fit: {_fitting(len(devices))}"
        if types == ["CPU"]:
            need = self.pipe * self.data * self.model
            way_out += f"; or call tfpar.virtual_devices({need}) first"
        raise ValueError(
            f"pipe={self.pipe} x data={self.data} x model={self.model} needs "
            f"{self.pipe * self.data * self.model} devices; received {len(devices)}: "
            f"{[_short(d) for d in devices]}. {way_out}"
        )

    @property
    def axis_names(self):
        """The names of the axes, outermost first."""
        return AXES

    @property
    def shape(self):
        """The degree of each axis: {"pipe": p, "data": d, "model": m}."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self):
        """The number of devices."""
        return len(self.devices)

    @property
    def device_type(self):
        """ "CPU", "GPU" or "TPU"."""
        return _type(self.devices[0])

    def coordinates(self, device):
        """Where `device` stands: {"pipe": i, "data": j, "model": k}."""
        name = _find(device, tf.config.list_logical_devices())
        if name not in self.devices:
            raise ValueError(
                f"{device!r} is not in this mesh of {[_short(d) for d in self.devices]}"
            )
        place = np.unravel_index(self.devices.index(name), tuple(self.shape.values()))
        return {axis: int(i) for axis, i in zip(AXES, place)}

    def stage(self, k):
        """The mesh (pipe=1) of pipeline stage `k`."""
        if not 0 <= k < self.pipe:
            raise ValueError(f"stage must lie in 0..{self.pipe - 1}; received {k!r}")
        n = self.data * self.model
        return Mesh(data=self.data, model=self.model, devices=self.devices[k * n : (k + 1) * n])

    @property
    def stages(self):
        """The stage meshes, first to last."""
        return tuple(self.stage(k) for k in range(self.pipe))

    @functools.cached_property
    def dtensor_mesh(self):
        """The `dtensor.Mesh` with dims ("data", "model"); for pipe == 1 only."""
        if self.pipe > 1:
            raise ValueError(
                f"a mesh with pipe={self.pipe} is several stage meshes; use mesh.stage(k)"
            )
        ids = np.arange(self.size)
        return dtensor.Mesh(
            ["data", "model"],
            ids.reshape(self.data, self.model),
            ids.tolist(),
            [tf.DeviceSpec.from_string(d) for d in self.devices],
        )

    def layout(self, axes):
        """The `dtensor.Layout` for `axes`: one of None, "data", "model" per dim."""
        return dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], self.dtensor_mesh)

    def __str__(self):
        rows = [("device", *AXES)]
        for device in self.devices:
            rows.append((_short(device), *map(str, self.coordinates(device).values())))
        return "\n".join([repr(self), *aligned(rows)])

    def __repr__(self):
        return (
            f"Mesh(pipe={self.pipe}, data={self.data}, model={self.model}) on {self.size} "
            f"{self.device_type} device(s)"
        )


def _default_devices(known):
    for kind in ("TPU", "GPU", "CPU"):
        found = tuple(d.name for d in known if d.device_type == kind)
        if found:
            return tuple(_find(name, known) for name in found)
    raise ValueError("TensorFlow shows no devices")


def _find(device, known):
    """The full canonical name of a device given in any of TensorFlow's spellings."""
    name = getattr(device, "name", device)
    found = re.search(r"(\w+):(\d+)$", str(name))
    if found:
        kind, index = found.group(1).upper(), int(found.group(2))
        job = re.match(r"^/job:[^/]+/replica:\d+/task:\d+", str(name))
        for candidate in known:
            if candidate.device_type == kind and candidate.name.endswith(f":{kind}:{index}"):
                full = _full(candidate.name)
                if job is None or full.startswith(job.group(0)):
                    return full
    names = [_short(d.name) for d in known]
    raise ValueError(f"unknown device {name!r}; TensorFlow has {names}")


def _full(name):
    if name.startswith("/job:"):
        return name
    return "/job:localhost/replica:0/task:0" + name


def _type(device):
    return device.split(":")[-2].upper()


def _short(device):
    return ":".join(device.split(":")[-2:])


def _fitting(n):
    """Degrees (data, model) that multiply to n, as text."""
    return ", ".join(f"data={d} model={n // d}" for d in range(1, n + 1) if n % d == 0)
