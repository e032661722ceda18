"""The examples run from a shell; each needs a process, and virtual devices, of its own."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def run(script, *flags):
    done = subprocess.run(
        [sys.executable, f"examples/{script}.py", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.timeout(300)
def test_language_model_trains_as_on_one_device(tmp_path):
    code, out, err = run("language_model", "--quick", f"--logdir={tmp_path}")
    assert code == 0, out + err
    assert float(re.search(r"difference of a loss: +(\S+)", out)[1]) < 1e-4
    loss = float(re.search(r"validation loss +(\S+)", out)[1])
    assert loss < 4.6, "no better than a uniform guess over the characters"
    assert (tmp_path / "language_model.keras").exists()
    assert list(tmp_path.glob("train/events.*")), "no TensorBoard logs"


@pytest.mark.timeout(300)
def test_image_classification_is_the_same_on_one_device(tmp_path):
    pytest.importorskip("sklearn")
    code, out, err = run("image_classification", "--quick", f"--logdir={tmp_path}")
    assert code == 0, out + err
    _, on_mesh, on_one = re.search(r"(accuracy) +(\S+) +(\S+)\n", out).groups()
    assert on_mesh == on_one
    assert float(on_mesh) > 0.2, "no better than a guess among ten digits"
    assert (tmp_path / "digits.keras").exists()


@pytest.mark.parametrize(
    ("script", "flag", "message"),
    [
        ("language_model", "--model=3", "--model must divide the 4 heads, got 3"),
        ("language_model", "--data=5", "--data must divide the batch of 32, got 5"),
        ("image_classification", "--model=3", "--model must divide the 128 units, got 3"),
        ("image_classification", "--data=0", "--data=0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(script, flag, message, tmp_path):
    code, out, err = run(script, flag, f"--logdir={tmp_path}")
    assert code != 0
    assert message in out + err
    assert "Traceback" not in err


@pytest.mark.timeout(300)
def test_fine_tuning_from_a_plain_file_to_a_plain_file(tmp_path):
    pytest.importorskip("keras_hub")
    code, out, err = run("finetune", "--quick", "--zero=3", f"--logdir={tmp_path}")
    assert code == 0, out + err
    before, after = map(float, re.search(r"before (\S+), after (\S+) nats", out).groups())
    assert after < before, "it has learnt nothing"
    assert float(re.search(r"difference of a logit: (\S+)", out)[1]) < 1e-3
    assert "split token_embedding/embeddings (101, 16)" in out
    assert "padded to 104" in out
