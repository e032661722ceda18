"""The bench runs, and what it counts is right; how fast anything is, it does not judge."""

import json
import pathlib
import subprocess
import sys

import pytest

from bench import report

ROOT = pathlib.Path(__file__).parents[1]


def bench(*flags):
    return subprocess.run(
        [sys.executable, "-m", "bench", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_peer(tmp_path):
    path = tmp_path / "bench.json"
    done = bench(
        "--quick", "--workloads=tiny", "--peers=plain,tfpar data=4,tfpar model=4", f"--json={path}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    rows = {row["peer"]: row for row in result["results"]}
    assert list(rows) == ["plain", "tfpar data=4", "tfpar model=4"]
    assert result["machine"]["cores"] >= 1
    for row in rows.values():
        assert row["workload"] == "tiny"
        assert len(row["blocks"]) == 2
        for field in ("step_seconds", "step_ratio", "first_step_seconds", "first_step_ratio"):
            assert row[field] > 0, field
        assert row["peak_bytes"] > 2**20
        assert row["peer"] in done.stdout
    assert rows["plain"]["step_ratio"] == rows["plain"]["first_step_ratio"] == 1

    # Weights and two Adam slots of each, in float32; then iterations (8 bytes), learning rate (4).
    up, up_bias, down, down_bias = 8 * 16, 16, 16, 1
    replicated = 3 * 4 * (up + up_bias + down + down_bias) + 12
    split = 3 * 4 * ((up + up_bias + down) // 4 + down_bias) + 12
    assert rows["plain"]["variable_bytes_per_device"] == replicated
    assert rows["tfpar data=4"]["variable_bytes_per_device"] == replicated
    assert rows["tfpar model=4"]["variable_bytes_per_device"] == split


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--peers=plain,horovod", "got 'horovod'"),
        ("--workloads=resnet", "got 'resnet'"),
        ("--blocks=0", "--blocks=0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flag, message):
    done = bench(flag)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def raw(blocks, first_step=1.0):
    return {"blocks": blocks, "first_step": first_step, "peak_bytes": 2**20, "variable_bytes": 4}


def test_ratios_are_taken_within_a_round():
    """A slow round slows both peers; a ratio of medians would compare different rounds."""
    plain = raw([1.0, 1.0, 9.0], first_step=2.0)
    row = report.summary("tiny", "mine", raw([2.0, 8.0, 18.0], first_step=3.0), plain)
    assert row["step_seconds"] == 8.0
    assert row["step_ratio"] == 2.0
    assert row["first_step_ratio"] == 1.5


def test_tables_show_every_row_also_without_plain_keras():
    row = report.summary("tiny", "mine", raw([0.002]), None)
    text = report.table("tiny", [row])
    assert "mine" in text and "2.00 ms" in text and "1 MiB" in text and " - " in text
    lines = report.table("tiny", [row], markdown=True).splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {len(report.COLUMNS) + 1}
