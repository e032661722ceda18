"""The `tfpar` command."""

import os
import sys
from importlib import metadata

from absl import app, flags

USAGE = """tfpar COMMAND [flags]

  tfpar version    the versions of tfpar and of what it stands on
  tfpar devices    the devices that a mesh can use, and the degrees that fit them

Flags of a command: tfpar COMMAND --help
"""

_VIRTUAL = flags.DEFINE_integer(
    "virtual", None, "devices: as if tfpar.virtual_devices(n) had been called.", lower_bound=1
)


def version():
    """Prints versions."""
    import tfpar

    print(f"tfpar {tfpar.__version__}")
    for name in ("tensorflow", "keras", "numpy"):
        print(f"{name} {metadata.version(name)}")
    print(f"python {sys.version.split()[0]}")


def devices():
    """Prints the devices as TensorFlow names them, and the meshes that they can form."""
    import tensorflow as tf
    from rich.console import Console
    from rich.table import Table

    import tfpar

    if _VIRTUAL.value:
        tfpar.virtual_devices(_VIRTUAL.value)
    found = tf.config.list_logical_devices()
    table = Table(title="Devices")
    table.add_column("device")
    table.add_column("kind")
    for device in found:
        table.add_row(device.name.replace("/device:", ""), device.device_type)
    Console().print(table)
    kinds = [kind for kind in ("TPU", "GPU", "CPU") if any(d.device_type == kind for d in found)]
    n = sum(d.device_type == kinds[0] for d in found)
    fit = ", ".join(f"Mesh(data={d}, model={n // d})" for d in range(1, n + 1) if n % d == 0)
    print(f"Meshes over the {n} {kinds[0]} device(s): {fit}")


COMMANDS = {"version": version, "devices": devices}


def main(argv):
    if len(argv) != 2 or argv[1] not in COMMANDS:
        what = f"unknown command {' '.join(argv[1:])!r}\n\n" if argv[1:] else ""
        sys.exit(f"{what}{USAGE}")
    COMMANDS[argv[1]]()


def run():
    """The entry point of the console script."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.modules["__main__"].__doc__ = USAGE  # what absl prints for --help
    app.run(main)


if __name__ == "__main__":
    run()
