"""Every task's functions can be captured in a CUDA graph."""

import pytest
import torch
from no_waiting import NoWaiting, WaitedError
from warp_beside_cpu import make_env

from rayagi.envs.tasks.provider import TASKS


def test_the_guard_detects_synchronising_operations():
    values = torch.ones(3)
    for waiting in (
        lambda: values.sum().item(),
        lambda: values[values > 0],
        lambda: bool(values.any()),
        lambda: values.nonzero(),
        lambda: torch.tensor([1.0]) + values,
        lambda: values[torch.ones((), dtype=torch.int64)],
    ):
        with NoWaiting(), pytest.raises(WaitedError):
            waiting()
    with NoWaiting():
        assert torch.where(values > 0, values, 0.0).shape == (3,)
        values[1:] = 2.0


@pytest.mark.parametrize("env_id", TASKS)
def test_a_tasks_functions_do_not_synchronise(env_id):
    env = make_env(env_id, "mujoco_cpu", 3)
    env.reset()
    env.step(torch.zeros(3, env.info.action.dim))
    rules, task = env._rules, env._task
    with NoWaiting():
        state = env._state()
        controls, memory = rules.control(state)
        outcome = rules.reward_and_done(state)
        obs = rules.observe(state)
        start = rules.start(env._draws(None, task.num_start_draws, start=True))
    assert (controls.shape, obs.shape) == ((3, rules.model.nu), (3, task.obs_dim))
    assert (outcome.rewards.shape, outcome.terminated.dtype) == ((3,), torch.bool)
    assert (start.qpos.shape, start.qvel.shape) == ((3, rules.model.nq), (3, rules.model.nv))
    remembered = {*start.memory}
    assert {*memory, *outcome.memory} <= remembered, "a step may only change what a start sets"
