"""Run folders of version 0.1 (tests/data/saved_runs; present names of settings): evaluated, reported and gone on with."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from rayagi.cli import main

pytestmark = pytest.mark.cluster

SAVED = Path(__file__).parents[1] / "data" / "saved_runs"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=() if path.name == "v0_1_ppo" else pytest.mark.slow)
        for path in sorted(SAVED.iterdir())
    ],
)
def test_an_old_run_is_evaluated_and_goes_on(tmp_path, name, capsys):
    run = tmp_path / name
    shutil.copytree(SAVED / name, run)
    before = json.loads((run / "run.json").read_text())["counters"]
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0, capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--iterations", "5"]) == 0, capsys.readouterr().err
    after = json.loads((run / "run.json").read_text())["counters"]
    assert (before["iteration"], after["iteration"]) == (3, 5)
    assert after["env_steps"] > before["env_steps"]
    with (run / "progress.csv").open() as file:
        assert [row["iteration"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5"]
    assert main(["report", str(run)]) == 0, capsys.readouterr().err
