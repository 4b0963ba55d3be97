"""The tutorial's files and commands, as they stand in the document, with less training and a shorter video."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import imageio.v3
import pytest

import rayagi.envs as envs

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorials" / "own-task.md").read_text()
SHORTER = {
    "--time 1m --evaluate-every 40": "--iterations 2 --set gmi.num_gmis=1 --set env.kwargs.max_episode_steps=12",
    "--time 2m": "--iterations 3",
    "--video": "--episodes 1 --video",
}
"""What takes long in the document, and what is run in its place."""


def block(kind):
    (found,) = re.findall(rf"```{kind}\n(.*?)```", TUTORIAL, re.DOTALL)
    return found


def run(command, folder):
    """A command of the document's, in a folder that holds its files, with this checkout's rayagi."""
    words = [sys.executable, "-m", *command.split()]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_JOB_ID")
    }
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def can_draw():
    try:
        envs.render_env("rayagi/Ant-v0").close()
    except envs.RenderingError:
        return False
    return True


@pytest.mark.cluster
def test_the_tutorial_leads_from_a_model_to_a_policy_and_its_video(tmp_path):
    task, model = block("python"), block("xml")
    assert len(task.splitlines()) <= 44  # as the text says
    (tmp_path / "bead.py").write_text(task)
    (tmp_path / "bead.xml").write_text(model)
    commands = block("sh")
    for long, short in SHORTER.items():
        assert commands.count(long) == 1
        commands = commands.replace(long, short)
    listed, trained, rendered, resumed = commands.splitlines()
    if not can_draw():
        rendered = rendered.partition(" --video")[0]
    assert re.search(r"bead:Bead +mujoco_cpu, mujoco_warp +5 +1 reals +250", run(listed, tmp_path))
    output = run(trained, tmp_path)
    assert "cannot be compiled" not in output
    output = run(rendered, tmp_path)
    if "--video" in rendered:
        assert "12 frames" in output
        frames = imageio.v3.imread(tmp_path / "bead.mp4")
        assert frames.shape[0] >= 11
        assert frames[0].std() > 5  # a picture, not a blank
    run(resumed, tmp_path)
    with (tmp_path / "runs" / "bead" / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["iteration"] for row in rows] == ["1", "2", "3"]
    last = {name: float(rows[-1][name]) for name in ("reward_near", "reward_effort", "episode_return_mean")}
    assert last["reward_near"] > 0 > last["reward_effort"]
    assert last["reward_near"] + last["reward_effort"] == pytest.approx(last["episode_return_mean"], rel=1e-5)
