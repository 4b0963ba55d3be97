"""Rules that are compiled take the course that they take on torch, and what cannot be compiled is said."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from mujoco.batch import Batch

from rayagi.envs.families import Place
from rayagi.envs.fused.errors import SimulatorError
from rayagi.envs.mujoco_cpu.worlds import CpuWorlds
from rayagi.envs.tasks import family
from rayagi.envs.tasks.catalogue import TASKS, make_task
from rayagi.envs.tasks.compiled.tensors import RulesGraph
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.family import OwnTasks
from rayagi.envs.tasks.rotations import angle_between, matrix, multiply, rotate_back
from rayagi.envs.tasks.vec_env import TaskVecEnv

SEED = 2**63 + 5


def make(env_id, num_envs=8, *, threads=1, seed=SEED, **options):
    """Compiled."""
    env = OwnTasks().make(env_id, "mujoco_cpu", options, Place(num_envs, 40, seed, threads))
    assert isinstance(env, CompiledTaskVecEnv)
    return env


def on_torch(env):
    """As many environments whose rules run on torch, with the same seed and indices."""
    worlds = CpuWorlds(env._rules.model, env.num_envs, 1, env._task.fields)
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
def test_compiled_rules_take_the_course_of_those_on_torch(env_id):
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
def test_a_course_goes_on_where_the_other_kind_of_rules_left_it(env_id):
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
def test_a_world_begins_as_after_mujocos_own_reset(env_id):
    task = make_task(env_id, {})
    model = task.load()
    worlds, batch = CpuWorlds(model, 4, 1, task.fields), Batch(model, 4, 1)
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


def test_without_a_compiler_rules_run_on_torch_and_that_is_said_once(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    family._tell_once.cache_clear()
    caplog.set_level("INFO", "rayagi.envs.tasks")
    place = Place(2, 0, 0, 1)
    envs = [OwnTasks().make("rayagi/Ant-v0", "mujoco_cpu", {}, place) for _ in range(2)]
    assert [type(env) for env in envs] == [TaskVecEnv, TaskVecEnv]
    (message,) = [record.message for record in caplog.records]
    assert "rules run on torch" in message
    assert "no C compiler (looked for no-such-compiler)" in message


OPERATIONS = {
    "arithmetic": lambda a, b: (2.0 - a * b) / (b + 3.0) - (-a) + 1.0 / b,
    "comparisons": lambda a, b: ((a < b) | (a > 0.5)) & (b <= 2.0) & (b >= -1.0),
    "truth values count": lambda a, b: 250.0 * (a > b) + (a > 0.0).sum(-1, dtype=a.dtype).unsqueeze(-1),
    "where": lambda a, b: torch.where(a > b, -1.0, b).masked_fill(b > 0.4, 7.0),
    "bounds": lambda a, b: torch.clamp(a, b, b + 0.1) + a.clamp(max=0.2) + b.clamp(min=-0.1) + a.clamp_min(0.0),
    "least and most": lambda a, b: torch.minimum(a, b) * torch.maximum(a, b).amin(0),
    "functions": lambda a, b: torch.exp(a) + torch.cos(b) - torch.sin(a) + torch.atan2(a, b) + a.abs().square(),
    "folds": lambda a, b: torch.linalg.vector_norm(a - b, dim=-1) + (a > 0.9).any(-1).to(a.dtype),
    "shapes": lambda a, b: torch.stack(torch.cat((a, b), -1).chunk(2, -1), 1).flatten(0, 1).T.unflatten(0, (2, 2)),
    "places": lambda a, b: a[:, 1:3].unsqueeze(1).expand(2, 3, 2).movedim(-1, 0).contiguous().unbind(1)[0],
    "turned": lambda a, b: rotate_back(a, b[:, :3]) + matrix(a)[:, 1],
    "quaternions": lambda a, b: multiply(a, b) * angle_between(a, b).unsqueeze(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_of_traced_tensors_is_that_of_torch(name):
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn((2, 4), generator=generator, dtype=torch.float64) for _ in range(2))
    graph = RulesGraph("a test")
    # Operations of constants are worked out while they are traced.
    traced = OPERATIONS[name](graph.tensor(a.tolist()), graph.tensor(b.tolist()))
    want = OPERATIONS[name](a, b)
    assert traced.shape == want.shape
    got = [value.node.value for value in traced.values.flat]
    np.testing.assert_allclose(np.array(got, dtype=float), want.double().flatten().numpy(), rtol=1e-14)


def test_assigning_to_a_view_changes_what_it_is_a_view_of():
    graph = RulesGraph("a test")
    row = graph.tensor([[1.0, 2.0, 3.0, 4.0]])
    whole = row.repeat(1, 1)
    whole[:, torch.tensor([0, 3])] = graph.tensor([[8.0, 9.0]])
    whole[:, 1:3][:, 0] = -math.pi
    assert [value.node.value for value in whole.values.flat] == [8.0, -math.pi, 3.0, 9.0]
    assert [value.node.value for value in row.values.flat] == [1.0, 2.0, 3.0, 4.0]


def test_what_cannot_be_compiled_is_named():
    graph = RulesGraph("a test")
    with pytest.raises(SimulatorError, match="torch's cumsum cannot be compiled yet"):
        torch.cumsum(graph.tensor([[1.0]]), -1)
