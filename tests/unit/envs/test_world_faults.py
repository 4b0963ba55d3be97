"""Simulation errors of a world are counted and stay in that world."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from warp_beside_cpu import make_env

ANT = "rayagi/Ant-v0"
WARP = pytest.param(
    "mujoco_warp",
    marks=[
        pytest.mark.timeout(900),  # Warp compiles for the CPU
        pytest.mark.skipif(find_spec("mujoco_warp") is None, reason="the extra 'gpu' is not installed"),
    ],
)


@pytest.mark.parametrize("engine", ["mujoco_cpu", WARP])
def test_an_unstable_world_is_counted_and_reset(engine, caplog):
    env, healthy = make_env(ANT, engine, 2), make_env(ANT, engine, 2)
    env.reset(), healthy.reset()
    state = env.state_dict()
    state["worlds"]["qvel"][0, 3] = float("nan")
    last = env.load_state_dict(state)
    found, expected = env.step(torch.ones(2, 8)), healthy.step(torch.ones(2, 8))
    assert env.sim_errors == {"unstable": 1, "contact overflow": 0, "constraint overflow": 0}
    assert found.terminated.tolist() == [True, False]
    assert found.rewards[0] == 0.0
    assert torch.equal(found.final_obs[0], last[0])
    assert torch.isfinite(found.obs).all()
    assert torch.equal(found.obs[1], expected.obs[1])
    assert env._episode.tolist() == [1, 0]
    env.close()
    assert "rayagi/Ant-v0: simulation errors, whose worlds were reset: 1 unstable" in caplog.text
    caplog.clear()
    healthy.close()
    assert not caplog.text
