"""The `tfpar` command."""

import subprocess
import sys

import pytest

import tfpar


def command(*args):
    return subprocess.run(
        [sys.executable, "-m", "tfpar.cli", *args], capture_output=True, text=True, timeout=120
    )


def test_version():
    done = command("version")
    assert done.returncode == 0, done.stderr
    assert f"tfpar {tfpar.__version__}" in done.stdout
    assert "tensorflow 2." in done.stdout


def test_devices_shows_what_a_mesh_can_use():
    done = command("devices", "--virtual=6")
    assert done.returncode == 0, done.stderr
    assert "CPU:5" in done.stdout and "CPU:6" not in done.stdout
    assert "Mesh(data=3, model=2)" in done.stdout


@pytest.mark.parametrize(
    "args, words",
    [
        ((), "tfpar COMMAND"),
        (("deploy",), "unknown command 'deploy'"),
        (("devices", "--virtual=0"), "virtual=0"),
        (("devices", "--bogus"), "Unknown command line flag 'bogus'"),
    ],
)
def test_mistakes_are_told(args, words):
    done = command(*args)
    assert done.returncode != 0
    assert words in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
