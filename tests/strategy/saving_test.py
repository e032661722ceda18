"""What is trained on a mesh loads anywhere, and what was saved elsewhere loads on a mesh."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit_test import RULES, assert_close, compiled, data, scope, two_by_two


def trained(strategy):
    x, y = data(24)
    model = compiled(strategy)
    model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("source", ["one", "mesh"])
@pytest.mark.parametrize("target", ["one", "mesh", "other mesh"])
@pytest.mark.parametrize("form", ["keras", "weights", "checkpoint"])
def test_training_goes_on_after_loading_elsewhere(source, target, form, tmp_path):
    """Weights, Adam's moments and the step count arrive whole."""
    x, y = data(24)
    strategies = {
        "one": lambda: None,
        "mesh": lambda: two_by_two(RULES),
        "other mesh": lambda: two_by_two({r"down/kernel": (None, "model")}),
    }
    a = trained(strategies[source]())
    strategy = strategies[target]()
    if form == "keras":
        a.save(tmp_path / "m.keras")
        with scope(strategy):
            b = keras.models.load_model(tmp_path / "m.keras")
    else:
        b = compiled(strategy)
        b.train_on_batch(x[:3], y[:3])
        if form == "weights":
            a.save_weights(tmp_path / "m.weights.h5")
            b.load_weights(tmp_path / "m.weights.h5")
        else:
            saved = tf.train.Checkpoint(model=a, optimizer=a.optimizer).save(tmp_path / "ck")
            status = tf.train.Checkpoint(model=b, optimizer=b.optimizer).restore(saved)
            status.assert_existing_objects_matched()
    assert_close(a.get_weights(), b.get_weights(), 1e-7)
    histories = [m.fit(x, y, epochs=2, shuffle=False, verbose=0).history for m in (a, b)]
    assert_close(*histories)
    assert_close(a.get_weights(), b.get_weights())


def test_get_and_set_weights():
    a, b = trained(None), compiled(two_by_two(RULES))
    b.set_weights(a.get_weights())
    assert_close(a.get_weights(), b.get_weights(), 1e-9)
    x, _ = data(5)
    assert_close(a.predict(x, verbose=0), b.predict(x, verbose=0))


def test_export_serves_without_tfpar(tmp_path):
    model = trained(two_by_two(RULES))
    x, y = data(5)
    want = model.predict(x, verbose=0)
    model.export(str(tmp_path / "served"), verbose=False)
    np.save(tmp_path / "x.npy", x)
    script = (
        "import sys, numpy as np, tensorflow as tf;"
        f"m = tf.saved_model.load(r'{tmp_path / 'served'}');"
        f"np.save(r'{tmp_path / 'y.npy'}', m.serve(np.load(r'{tmp_path / 'x.npy'}')).numpy());"
        "assert not any(name.startswith('tfpar') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert_close(np.load(tmp_path / "y.npy"), want)
    model.train_on_batch(x, y)  # the export left the model on its mesh
    assert model.get_layer("up").kernel.value.shards()[0].shape == (6, 4)
