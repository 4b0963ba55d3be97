"""Compiled task functions agree with torch's; a task that cannot be compiled is reported."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import Batch

from collectives import kernels
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.provider import TASKS, OwnTaskProvider, make_task
from rayagi.envs.tasks.vec_env import TaskVecEnv

SEED = 2**63 + 5


def make(env_id, num_envs=8, *, threads=1, seed=SEED, **options):
    """Compiled."""
    env = OwnTaskProvider().make(env_id, "mujoco_cpu", options, VecEnvArgs(num_envs, 40, seed, threads))
    assert isinstance(env, CompiledTaskVecEnv)
    return env


def on_torch(env):
    """The same environments with functions on torch, same seed and indices."""
    worlds = CpuBatchedSim(env._rules.model, env.num_envs, 1, env._task.fields)
    return TaskVecEnv(env.info, env._rules, worlds, first_env_index=40, seed=SEED)


def actions_of(env, steps):
    generator = torch.Generator().manual_seed(2)
    size = (env.num_envs, env.info.action.dim)
    return [2.4 * torch.rand(size, generator=generator) - 1.2 for _ in range(steps)]


def assert_same(got, want):
    for name in ("terminated", "truncated", "final_ids"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    for name in ("obs", "rewards", "final_obs"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("env_id", TASKS)
def test_compiled_functions_agree_with_torch(env_id):
    compiled = make(env_id, max_episode_steps=13)
    torches = on_torch(compiled)
    torch.testing.assert_close(compiled.reset(), torches.reset(), rtol=1e-6, atol=1e-6)
    ended = 0
    for actions in actions_of(compiled, 30):
        got, want = compiled.step(actions), torches.step(actions)
        assert_same(got, want)
        torch.testing.assert_close(compiled.fields["qpos"], torches.fields["qpos"], rtol=0, atol=1e-9)
        ended += len(got.final_ids)
    assert ended >= 2 * compiled.num_envs


@pytest.mark.parametrize("env_id", TASKS)
def test_states_are_interchangeable_between_compiled_functions_and_torch(env_id):
    compiled = make(env_id, max_episode_steps=13)
    torches = on_torch(compiled)
    compiled.reset()
    actions = actions_of(compiled, 20)
    for action in actions[:5]:
        compiled.step(action)
    torches.load_state_dict(compiled.state_dict())
    for action in actions[5:10]:
        assert_same(compiled.step(action), torches.step(action))
    resumed = make(env_id, max_episode_steps=13)
    resumed.load_state_dict(torches.state_dict())
    for action in actions[10:]:
        assert_same(resumed.step(action), torches.step(action))


@pytest.mark.parametrize("name", ["obs", "actions", "episode", "memory"])
def test_a_state_of_another_shape_is_refused_and_changes_nothing(name):
    env = make("rayagi/Anymal-v0", 4)
    env.reset()
    before, actions = env.state_dict(), actions_of(env, 3)
    wrong = env.state_dict()
    holder, key = (wrong["memory"], next(iter(wrong["memory"]))) if name == "memory" else (wrong, name)
    holder[key] = holder[key][:3]
    env.step(actions[0])
    with pytest.raises(EnvironmentOptionError, match=rf"saved state's {name}.* is \(3.*, not \(4"):
        env.load_state_dict(wrong)
    found = env.step(actions[1])
    again = make("rayagi/Anymal-v0", 4)
    again.load_state_dict(before)
    again.step(actions[0])
    assert torch.equal(found.obs, again.step(actions[1]).obs)


def test_outputs_do_not_follow_torchs_default_type():
    env, doubled = (make("rayagi/Anymal-v0", 4, max_episode_steps=2) for _ in range(2))
    assert torch.equal(env.reset(), doubled.reset())
    for actions in actions_of(env, 3):
        wanted = env.step(actions)
        torch.set_default_dtype(torch.float64)
        try:
            found = doubled.step(actions)
        finally:
            torch.set_default_dtype(torch.float32)
        for name in ("obs", "rewards", "final_obs", "reward_terms"):
            assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def test_it_draws_the_numbers_that_torch_draws_to_the_last_bit():
    # Anymal's starts are products and sums of the numbers drawn.
    compiled = make("rayagi/Anymal-v0", 64)
    torches = on_torch(compiled)
    compiled.reset(), torches.reset()
    for name in ("qpos", "qvel"):
        assert torch.equal(compiled.fields[name], torches.fields[name])
    assert torch.equal(
        compiled.state_dict()["memory"]["commands"], torches.state_dict()["memory"]["commands"]
    )


@pytest.mark.parametrize("env_id", TASKS)
def test_a_reset_equals_mujocos_own(env_id):
    task = make_task(env_id, {})
    model = task.load()
    worlds, batch = CpuBatchedSim(model, 4, 1, task.fields), Batch(model, 4, 1)
    begun = task.rules(model, device=worlds.device, dtype=worlds.dtype).start(
        torch.rand((2, task.num_start_draws), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    )
    bound = {name: batch.bind(name) for name in ("qpos", "qvel", *task.fields)}
    worlds.step(torch.ones((4, model.nu), dtype=torch.float64), 7)
    batch.ctrl[:] = 1.0
    batch.step(nstep=7)
    worlds.restart(torch.tensor([1, 3]), begun.qpos, begun.qvel)
    batch.reset(ids=np.array([1, 3]), stage=mujoco.mjtStage.mjSTAGE_NONE)
    bound["qpos"][[1, 3]], bound["qvel"][[1, 3]] = begun.qpos.numpy(), begun.qvel.numpy()
    batch.forward(ids=np.array([1, 3]))
    np.testing.assert_array_equal(worlds._batch.state, batch.state)
    for name, values in bound.items():
        np.testing.assert_array_equal(worlds.fields[name].numpy(), values)


def test_without_a_compiler_functions_run_on_torch_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    kernels._log_once.cache_clear()
    caplog.set_level("INFO", "rayagi.envs.tasks")
    place = VecEnvArgs(2, 0, 0, 1)
    envs = [OwnTaskProvider().make("rayagi/Ant-v0", "mujoco_cpu", {}, place) for _ in range(2)]
    assert [type(env) for env in envs] == [TaskVecEnv, TaskVecEnv]
    (message,) = [record.message for record in caplog.records]
    assert "rules run on torch" in message
    assert "no C compiler (looked for no-such-compiler)" in message
