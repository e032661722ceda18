"""How the package is built: imports run one way, private names stand in one file."""

import ast
import pathlib

import pytest

import tfpar

ROOT = pathlib.Path(tfpar.__file__).parent
ORDER = [
    "_versions",
    "_tf",
    "mesh",
    "zero",
    "structure",
    "layouts",
    "variables",
    "denominators",
    "strategy",
    "layers",
    "collectives",
    "accumulation",
    "scaling",
    "pipeline",
    "checkpoint",
    "trace",
    "launch",
    "testing",
    "cli",
]
FILES = sorted(ROOT.rglob("*.py"))


def imported(file):
    """The dotted names that `file` imports at its top level."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(name):
    """The part of tfpar that a dotted name belongs to, or None."""
    parts = name.split(".")
    return parts[1] if parts[0] == "tfpar" and len(parts) > 1 and parts[1] in ORDER else None


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_run_one_way(file):
    here = file.relative_to(ROOT).with_suffix("").parts[0]
    if here == "__init__":
        return
    for name in imported(file):
        other = part(name)
        assert other is None or ORDER.index(other) <= ORDER.index(here), f"{here} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_private_names_are_imported_in_one_place(file):
    if file.name == "_tf.py":
        return
    for name in imported(file):
        assert not name.startswith(("tensorflow.python", "tensorflow.dtensor", "keras.src")), name


@pytest.mark.parametrize("name", tfpar.__all__)
def test_public_names_are_documented(name):
    thing = getattr(tfpar, name)
    assert thing.__doc__ and len(thing.__doc__) > 40
