"""An asynchronous run as a user starts it, interrupts it by a limit, and resumes it: it solves its task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayagi.config.yaml_text import parse_yaml
from rayagi.run.csv_log import read_rows

pytestmark = pytest.mark.cluster

TIMEOUT_S = 240


def rayagi(folder, *arguments):
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "rayagi", *arguments],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_inverted_pendulum_is_solved_asynchronously_and_across_a_resume(tmp_path):
    started = ("train", "InvertedPendulum-v5", "--algorithm", "appo", "--name", "a", "--iterations", "10")
    output = rayagi(tmp_path, *started)
    assert "decoupled on cpu: 3 GMIs" in output
    assert "learned from (TTP)" in output
    run = tmp_path / "runs" / "a"
    first = read_rows(run / "progress.csv")
    assert [row["iteration"] for row in first] == list(range(1, 11))

    resumed = ("train", "--resume", str(run), "--iterations", "1000000", "--stop-return", "900")
    output = rayagi(tmp_path, *resumed, "--time", "3m")
    assert "reached 900" in output
    rows = read_rows(run / "progress.csv")
    assert rows[9]["env_steps_total"] == first[9]["env_steps_total"]
    assert max(row["policy_lag_max"] for row in rows) <= 4
    assert all(row["samples_per_second"] > 0 for row in rows)
    experience = json.loads((run / "experience.json").read_text())
    assert experience["rows"]["missing"] == 0
    steps = parse_yaml((run / "config.yaml").read_text())["appo"]["rollout_length"]
    assert steps * sum(experience["lags"].values()) == sum(row["train_samples"] for row in rows)
    assert "Policy lag" in (run / "report.html").read_text()
