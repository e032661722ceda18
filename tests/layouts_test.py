"""LayoutMap: strict rules whose errors name the rule, the variable, its shape and near paths."""

import keras
import pytest

import tfpar
from tfpar.layouts import bytes_per_device, explain

MESH = tfpar.Mesh(data=4, model=2)


def test_patterns_are_searched_in_the_path():
    layouts = tfpar.LayoutMap({r"up/kernel": (None, "model"), r"^down/": ("model", None)})
    assert layouts.lookup("block_1/up/kernel", (6, 8), MESH) == (None, "model")
    assert layouts.lookup("down/kernel", (8, 6), MESH) == ("model", None)
    assert layouts.lookup("block_1/down/kernel", (8, 6), MESH) == (None, None)
    assert layouts.lookup("norm/gamma", (8,), MESH) == (None,)


@pytest.mark.parametrize(
    "rules, path, shape, words",
    [
        ({"k": ("model",)}, "a/k", (4, 4), ["'k'", "1 axes", "'a/k'", "(4, 4)"]),
        ({"k": (None, "model")}, "a/k", (4, 5), ["'k'", "'a/k'", "(4, 5)", "5 is not", "to 6"]),
        ({"k": ("data", None)}, "a/k", (6, 4), ["data=4", "6 is not a multiple"]),
        ({"k": (None,), "a/": (None,)}, "a/k", (4,), ["2 rules", "'k'", "'a/'", "narrower"]),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, path, shape, words):
    with pytest.raises(ValueError) as error:
        tfpar.LayoutMap(rules).lookup(path, shape, MESH)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "pattern, axes, words",
    [
        ("k(", (None,), ["'k('", "regular expression"]),
        (7, (None,), ["7", "regular expression"]),
        ("k", "model", ["'k'", "tuple", "'model'"]),
        ("k", ("modle",), ["'modle'", "'data', 'model'"]),
        ("k", ("pipe",), ["'pipe'"]),
        ("k", ("model", "model"), ["one dim only"]),
    ],
)
def test_bad_rules_are_refused_when_written(pattern, axes, words):
    with pytest.raises(ValueError) as error:
        tfpar.LayoutMap({pattern: axes})
    for word in words:
        assert word in str(error.value)


def test_a_rule_that_matches_nothing_names_the_nearest_paths():
    layouts = tfpar.LayoutMap({r"mlp_upp/kernel": (None, "model")})
    with pytest.raises(ValueError, match=r"'mlp_upp/kernel' matches no variable.*'mlp_up/kernel'"):
        layouts.check_all_rules_matched([("mlp_up/kernel", (4, 4)), ("norm/gamma", (4,))])


def test_maps_join_and_the_right_one_wins():
    joined = tfpar.LayoutMap({"a": ("model",), "b": (None,)}) | {"a": ("data",)}
    assert dict(joined.items()) == {"a": ("data",), "b": (None,)}
    assert joined == tfpar.LayoutMap({"a": ("data",), "b": (None,)})


@pytest.mark.parametrize("as_layout", [True, False])
def test_takes_a_keras_layout_map(as_layout):
    devices = [f"cpu:{i}" for i in range(8)]
    mesh = keras.distribution.DeviceMesh((4, 2), ("batch", "model"), devices)
    theirs = keras.distribution.LayoutMap(mesh)
    axes = (None, "model")
    theirs["up/kernel"] = keras.distribution.TensorLayout(axes, mesh) if as_layout else axes
    theirs["embeddings"] = ("batch", None)
    want = tfpar.LayoutMap({"up/kernel": (None, "model"), "embeddings": ("data", None)})
    assert tfpar.LayoutMap.coerce(theirs) == want
    assert tfpar.MeshStrategy(MESH, theirs).layouts == want


@pytest.mark.parametrize("layouts", [5, ["k"], "k"])
def test_other_things_are_no_layouts(layouts):
    with pytest.raises(ValueError, match="layouts must be"):
        tfpar.LayoutMap.coerce(layouts)


@pytest.mark.parametrize(
    "shape, axes, want",
    [
        ((6, 8), (None, None), 192),
        ((6, 8), (None, "model"), 96),
        ((8, 8), ("data", "model"), 32),
        ((), (), 4),
    ],
)
def test_bytes_per_device(shape, axes, want):
    assert bytes_per_device(shape, 4, axes, MESH) == want


def test_explain_shows_every_variable_and_what_each_rule_caught():
    layouts = tfpar.LayoutMap({"up/kernel": (None, "model"), "nothing": (None,)})
    whole, split = (None,), (None, "model")
    rows = [("up/kernel", (6, 8), 4, split, split), ("up/bias", (8,), 4, whole, whole)]
    text = explain(rows, layouts, MESH)
    kernel = next(line for line in text.splitlines() if line.startswith("up/kernel"))
    assert "(6, 8)" in kernel and "96" in kernel and "model" in kernel
    bias = next(line for line in text.splitlines() if line.startswith("up/bias"))
    assert "32" in bias
    assert "nothing" in text
