"""The main job learns: the command line, a local Ray, two roles' worth of physics and updates, a policy that balances."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayagi.run.csv_log import read_rows

ROOT = Path(__file__).parents[2]


@pytest.mark.cluster
def test_inverted_pendulum_balances_for_900_steps_within_a_minute_of_training(tmp_path):
    command = [sys.executable, "-m", "rayagi", "train", "InvertedPendulum-v5", "--time", "60s"]
    command += ["--evaluate-every", "10", "--stop-return", "900", "--seed", "0", "--name", "pendulum"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "pendulum"
    record = json.loads((run / "run.json").read_text())
    assert (record["status"], record["reason"][:17]) == ("finished", "evaluation return"), record
    last = read_rows(run / "evaluations.csv")[-1]
    # The episode is cut at 1000 steps of reward 1; a policy that does nothing falls within 10.
    assert last["evaluation_return_mean"] >= 900
    assert last["evaluation_episodes"] == 10
    assert (run / "report.html").stat().st_size > 10_000
