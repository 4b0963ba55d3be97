"""A rendered task steps as the batched one, and its frames show the state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rayagi.envs as envs
from rayagi.envs.tasks.provider import TASKS
from rayagi.envs.tasks.rendered import RenderedTask
from rayagi.envs.tasks.task import MODELS


@pytest.mark.parametrize("task", TASKS)
def test_it_steps_as_the_batched_environments_do(task):
    drawn = RenderedTask(task, {"max_episode_steps": 5})
    batched = envs.make_env_factory(task, kwargs={"max_episode_steps": 5})(
        num_envs=1, first_env_index=0, seed=7, num_threads=1
    )
    obs, _ = drawn.reset(seed=7)
    np.testing.assert_array_equal(obs, batched.reset()[0])
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        action = 2 * torch.rand(drawn.action_space.shape, generator=generator) - 1
        got, want = drawn.step(action.numpy()), batched.step(action.unsqueeze(0))
        last = want.final_obs if len(want.final_ids) else want.obs
        np.testing.assert_array_equal(got[0], last[0])
        assert got[1:4] == (float(want.rewards), bool(want.terminated), number == 4)
        if got[2]:
            break
    drawn.close()


def test_a_frame_shows_the_robot_and_changes_when_it_moves():
    try:
        env = envs.render_env("rayagi/Ant-v0")
    except envs.RenderingError as error:
        pytest.skip(f"this machine cannot draw: {error}")
    assert env.metadata["render_fps"] == 60
    env.reset(seed=0)
    first = env.render()
    assert (first.shape, first.dtype) == ((480, 640, 3), np.uint8)
    for _ in range(10):
        env.step(np.ones(8, np.float32))
    moved = np.abs(env.render().astype(int) - first).max(axis=2) > 20
    assert 0.001 < moved.mean() < 0.9
    env.close()


def test_options_are_checked_as_those_of_the_batched_ones():
    with pytest.raises(envs.EnvironmentOptionError, match="there is no option gravity"):
        envs.render_env("rayagi/Ant-v0", {"gravity": 1})


def test_a_model_that_asks_for_a_smaller_framebuffer_is_drawn_whole(tmp_path):
    """Such as one written for a camera of 64 x 48 pixels: beyond them a frame was black, as all of a second one were."""
    own = (MODELS / "ball_balance.xml").read_text()
    small = own.replace(
        "<worldbody>", '<visual><global offwidth="64" offheight="48"/></visual><worldbody>', 1
    )
    (tmp_path / "small.xml").write_text(small)
    frames = []
    for options in ({}, {"xml_file": str(tmp_path / "small.xml")}):
        try:
            env = envs.render_env("rayagi/BallBalance-v0", options)
        except envs.RenderingError as error:
            pytest.skip(f"this machine cannot draw: {error}")
        env.reset(seed=0)
        frames.append(env.render())
        env.close()
    assert frames[0].std() > 1
    np.testing.assert_array_equal(*frames)
