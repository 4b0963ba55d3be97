"""Environments and tasks that are legal and do what few do: arrays used again, numbers that float32 cannot hold, memory of
fields, rewards that are not numbers."""

from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rayagi.config.yaml_text import parse_yaml
from rayagi.envs import make_env_factory
from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks import Start, StepOutcome, Task, TaskFunctions
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.provider import OwnTaskProvider, make_batched_sim
from rayagi.envs.tasks.vec_env import TaskVecEnv, describe

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class SameArray(gymnasium.Env):
    """Observations are one array; an episode has three steps."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.array = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.array[:] = self.steps = 0
        return self.array, {"final_obs": 5}

    def step(self, action):
        self.steps += 1
        self.array[:] = self.steps
        # Another shape in each environment and step.
        info = {"contacts": np.zeros(int(self.np_random.integers(1, 5)))}
        return self.array, 1.0, self.steps == 3, False, info


class Huge(gymnasium.Env):
    """An observation in step 2, and a reward in step 4, that float64 can hold and float32 cannot."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2), {}

    def step(self, action):
        self.steps += 1
        obs = np.array([self.steps, 1e300 if self.steps == 2 else 0.0])
        return obs, 1e200 if self.steps == 4 else 1.0, False, False, {}


gymnasium.register("SameArray-v0", entry_point=SameArray)
gymnasium.register("Huge-v0", entry_point=Huge)


def made(env_id, num_envs):
    return make_env_factory(env_id)(num_envs=num_envs, first_env_index=0, seed=0, num_threads=1)


def test_the_final_observation_is_kept_from_an_environment_that_uses_its_array_again():
    env = made("SameArray-v0", 4)
    env.reset()
    for _ in range(2):
        assert env.step(torch.zeros(4)).final_ids.tolist() == []
    found = env.step(torch.zeros(4))
    assert found.final_obs.tolist() == [[3.0, 3.0]] * 4
    assert found.obs.tolist() == [[0.0, 0.0]] * 4
    env.close()


def test_what_float32_cannot_hold_is_counted_and_the_world_reset():
    env = made("Huge-v0", 1)
    env.reset()
    results = [env.step(torch.zeros((1, 1))) for _ in range(2)]
    assert all(each.obs.isfinite().all() and each.rewards.isfinite().all() for each in results)
    assert results[1].terminated.tolist() == [True]
    assert results[1].final_obs.tolist() == [[1.0, 0.0]]  # the last one that was finite
    assert dict(env.sim_errors)["unstable"] == 1
    env.close()


class Rules(TaskFunctions):
    """Pays the way since the last step, which it remembers as the field itself."""

    def start(self, draws):
        qpos = draws.new_zeros((len(draws), self.model.nq))
        return Start(qpos, draws.new_zeros((len(draws), self.model.nv)), {"before": qpos.clone()})

    def control(self, state):
        return state.actions, {"before": state.fields["qpos"]}

    def reward_and_done(self, state):
        moved = state.fields["qpos"][:, 0] - state.memory["before"][:, 0]
        reward = torch.sqrt(moved) if self.task.takes_root else moved
        return StepOutcome(reward, state.fields["qpos"][:, 0].abs() > 0.9)

    def observe(self, state):
        return torch.cat((state.fields["qpos"], state.fields["qvel"]), -1)


@dataclass(frozen=True, kw_only=True)
class Cart(Task):
    takes_root: bool = False
    model_file = str(ASSETS / "inverted_pendulum.xml")
    action_dim = 1
    obs_dim = 4

    def rules(self, model, *, device, dtype):
        return Rules(self, model, device=device, dtype=dtype)


def both(**settings):
    """The compiled environments of a task, and torch's."""
    args = VecEnvArgs(2, 0, 0, 1)
    compiled = OwnTaskProvider().make(f"{__name__}:Cart", "mujoco_cpu", settings, args)
    assert isinstance(compiled, CompiledTaskVecEnv)
    task = Cart(**settings)
    worlds = make_batched_sim("mujoco_cpu", task, task.load(), args)
    rules = task.rules(task.load(), device=worlds.device, dtype=worlds.dtype)
    return compiled, TaskVecEnv(describe("x", "mujoco_cpu", task, 1000), rules, worlds)


def test_a_field_that_a_task_remembers_stays_as_it_was():
    envs = both()
    for env in envs:
        env.reset()
    for _ in range(3):
        compiled, by_torch = (env.step(torch.full((2, 1), 0.5)) for env in envs)
        assert (compiled.rewards > 0).all()
        torch.testing.assert_close(by_torch.rewards, compiled.rewards)


def test_a_reward_that_is_no_number_is_counted_and_the_world_reset():
    for env in both(takes_root=True):
        env.reset()
        env.step(torch.full((2, 1), 0.5))
        results = [env.step(torch.tensor([[0.5], [-1.0]])) for _ in range(6)]
        assert all(each.rewards.isfinite().all() for each in results)
        ended = [each.terminated.tolist() for each in results]
        assert [True, False] not in ended
        assert [False, True] in ended  # the second went back
        assert dict(env.sim_errors)["unstable"] == sum(second for _, second in ended)


def test_settings_may_take_over_others():
    text = "base: &base {gamma: 0.9, clip: 0.2}\nown: {<<: *base, clip: 0.3}\n"
    assert parse_yaml(text)["own"] == {"gamma": 0.9, "clip": 0.3}
    nested = "a: {b: &p {<<: {x: 1}, y: 2}}\nq: {<<: *p, y: 3}\n"
    assert parse_yaml(nested) == {"a": {"b": {"x": 1, "y": 2}}, "q": {"x": 1, "y": 3}}
    with pytest.raises(Exception, match="'clip' is given twice"):
        parse_yaml("own: {<<: {a: 1}, clip: 1, clip: 2}")
