"""The tutorial leads from a model to a policy and its video: what its commands print and leave behind."""

import csv
import re

import imageio.v3
import pytest

from tests.documents import ROOT, blocks, run_page

PAGE = ROOT / "docs" / "tutorials" / "own-task.md"


@pytest.mark.slow
@pytest.mark.cluster
def test_the_tutorial_leads_from_a_model_to_a_policy_and_its_video(tmp_path):
    (task,) = [block.text for block in blocks(PAGE) if block.title == "bead.py"]
    assert len(task.splitlines()) <= 44  # as the text says
    output = run_page(PAGE, tmp_path)
    assert re.search(r"bead:Bead +mujoco_cpu, mujoco_warp +5 +1 real +250", output)
    assert "cannot be compiled" not in output
    video = tmp_path / "bead.mp4"
    if video.exists():  # without OpenGL there is none
        assert "12 frames" in output
        frames = imageio.v3.imread(video)
        assert frames.shape[0] >= 11
        assert frames[0].std() > 5  # a picture, not a blank
    with (tmp_path / "runs" / "bead" / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["iteration"] for row in rows] == ["1", "2", "3"]
    last = {name: float(rows[-1][name]) for name in ("reward_near", "reward_effort", "episode_return_mean")}
    assert last["reward_near"] > 0 > last["reward_effort"]
    assert last["reward_near"] + last["reward_effort"] == pytest.approx(last["episode_return_mean"], rel=1e-5)
