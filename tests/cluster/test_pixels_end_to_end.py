"""Images rendered by MuJoCo: trained by two GMIs, evaluated and filmed by the commands."""

import csv
from pathlib import Path

import pytest

import rayagi.envs as envs
from rayagi.cli import main
from rayagi.coordinator.cluster import connected

pytestmark = pytest.mark.cluster

TASK = "experiments.pixels.env:PixelReach-v0"
CONFIG = Path(__file__).parents[2] / "experiments" / "pixels" / "reach.yaml"


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_machine():
    """Skipped where this machine cannot draw."""
    try:
        envs.render_env(TASK).close()
    except envs.RenderingError as error:
        pytest.skip(str(error))
    with connected():
        yield


@pytest.mark.slow
def test_images_are_trained_on_evaluated_and_filmed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ("--num-envs", "4", "--set", "evaluation.interval=2", "--set", "evaluation.num_episodes=3")
    train = ["train", TASK, "--config", str(CONFIG), "--name", "run", "--iterations", "3", *small]
    assert main(train) == 0, capsys.readouterr().err
    with Path("runs/run/evaluations.csv").open() as file:
        returns = [float(row["evaluation_return_mean"]) for row in csv.DictReader(file)]
    # 20 steps of at most sqrt(2) * 2 m.
    assert returns
    assert all(-57 < value < 0 for value in returns)
    assert main(["evaluate", "runs/run", "--trust-modules", "--episodes", "3", "--video", "film.mp4"]) == 0, (
        capsys.readouterr().err
    )
    assert "film.mp4: 20 frames" in capsys.readouterr().out
