"""Whole rollouts in C equal those of simulator and agent, step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.roles import Agent, LocalSimulator, collect
from actors.rollout import Rollout
from collectives import kernels
from rayagi import profiler
from rayagi.config.presets import preset
from rayagi.config.spec import NetworkSpec
from rayagi.envs import make_env_factory
from rayagi.envs.errors import SimulationError
from rayagi.envs.mujoco_cpu.vec_env import RolloutMujocoVecEnv
from rayagi.models.policy import new_policy
from rayagi.profiler import Category
from rayagi.profiler.trace import read_profile

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_ENVS, STEPS, SEED, FIRST = 11, 24, 3, 40
TASKS = ["Ant-v5", "Humanoid-v5", "HumanoidStandup-v5"]


class Collector:
    """Environments, a policy with a fixed seed, and rollouts of them."""

    def __init__(self, env_id, *, num_threads=1, num_envs=NUM_ENVS, first=FIRST, **kwargs):
        env = make_env_factory(env_id, kwargs=kwargs)(
            num_envs=num_envs, first_env_index=first, seed=SEED, num_threads=num_threads
        )
        spec = replace(
            preset(env_id), network=NetworkSpec(hidden=(20, 13), activation="elu", initial_log_std=0.3)
        )
        self.env, self.simulator = env, LocalSimulator(env)
        self.policy = new_policy(spec, env.info, torch.device("cpu"))
        self.rollout = Rollout.allocate(STEPS, num_envs, env.info, torch.device("cpu"))

    def whole_rollout(self, iteration):
        self.simulator.collect_rollout(self.rollout, self.policy.tensors(), iteration)
        return self.rollout

    def stepwise_rollout(self, iteration):
        noise = self.policy.noise(
            STEPS, self.env.num_envs, seed=SEED, first_env_index=FIRST, number=iteration
        )
        collect(self.simulator, Agent(self.policy), self.rollout, noise)
        return self.rollout


def assert_same(one, other):
    for name in ("raw_obs", "obs", "outputs", "actions", "terminated", "truncated", "last_obs"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    torch.testing.assert_close(one.rewards, other.rewards, rtol=1e-6, atol=1e-6)
    assert len(one.finals) == len(other.finals)
    for (step, ids, obs), (same_step, same_ids, same_obs) in zip(one.finals, other.finals, strict=True):
        assert step == same_step
        assert torch.equal(ids, same_ids)
        assert torch.equal(obs, same_obs)


@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rollout_is_the_stepwise_one(env_id, num_threads):
    """With time limits and, for Ant and Humanoid, falls; three rollouts, each continuing the previous one."""
    whole, steps = (
        Collector(env_id, num_threads=num_threads, max_episode_steps=17),
        Collector(env_id, max_episode_steps=17),
    )
    ends = 0
    for iteration in range(3):
        one, other = whole.whole_rollout(iteration), steps.stepwise_rollout(iteration)
        assert_same(one, other)
        ends += len(one.finals)
        assert whole.simulator.finished_lengths == steps.simulator.finished_lengths
        assert whole.simulator.finished_returns == pytest.approx(steps.simulator.finished_returns, rel=1e-6)
        assert torch.equal(whole.simulator._lengths, steps.simulator._lengths)
        torch.testing.assert_close(whole.simulator._returns, steps.simulator._returns, rtol=1e-6, atol=1e-6)
        assert torch.equal(whole.simulator.obs, steps.simulator.obs)
    assert ends > 3
    for collector in (whole, steps):
        collector.simulator.close()


@pytest.mark.parametrize(
    "options",
    [
        {"include_cfrc_ext_in_observation": False, "exclude_current_positions_from_observation": False},
        {"terminate_when_unhealthy": False, "contact_force_range": (-0.2, 0.3), "main_body": "aux_1"},
        {"forward_reward_weight": 2.0, "ctrl_cost_weight": 0.1, "healthy_z_range": (0.5, 0.7)},
    ],
)
def test_ant_s_options_are_in_its_formulas(options):
    whole, steps = Collector("Ant-v5", **options), Collector("Ant-v5", **options)
    for iteration in range(2):
        assert_same(whole.whole_rollout(iteration), steps.stepwise_rollout(iteration))


def test_humanoid_s_contact_costs_are_bounded():
    options = {"contact_cost_weight": 0.3, "contact_cost_range": (0.01, 0.02)}
    whole, steps = Collector("Humanoid-v5", **options), Collector("Humanoid-v5", **options)
    free, costs = Collector("Humanoid-v5", contact_cost_weight=0.0), []
    for iteration in range(2):
        assert_same(whole.whole_rollout(iteration), steps.stepwise_rollout(iteration))
        costs.append(free.whole_rollout(iteration).rewards - whole.rollout.rewards)
    # The lower bound in the air, the upper one on the ground.
    assert torch.stack(costs).min().item() == pytest.approx(0.01, abs=1e-5)
    assert torch.stack(costs).max().item() == pytest.approx(0.02, abs=1e-5)


def test_rollouts_and_steps_continue_each_other():
    mixed, steps = Collector("Ant-v5"), Collector("Ant-v5")
    for iteration, make in enumerate((mixed.whole_rollout, mixed.stepwise_rollout, mixed.whole_rollout)):
        assert_same(make(iteration), steps.stepwise_rollout(iteration))


def test_a_trajectory_does_not_depend_on_the_batch():
    whole, parts = (
        Collector("Ant-v5", num_envs=10),
        [Collector("Ant-v5", num_envs=5, first=FIRST + k) for k in (0, 5)],
    )
    for iteration in range(2):
        one, others = whole.whole_rollout(iteration), [part.whole_rollout(iteration) for part in parts]
        for name in ("obs", "actions", "rewards", "terminated", "truncated"):
            assert torch.equal(getattr(one, name), torch.cat([getattr(each, name) for each in others], 1)), (
                name
            )


def test_a_saved_state_continues_bit_for_bit():
    one, other = Collector("Ant-v5"), Collector("Ant-v5")
    one.whole_rollout(0)
    other.simulator.load_state_dict(one.simulator.state_dict())
    assert_same(one.whole_rollout(1), other.whole_rollout(1))
    assert torch.equal(one.rollout.rewards, other.rollout.rewards)


def test_threads_do_not_change_results():
    alone, shared = Collector("Ant-v5", num_envs=37), Collector("Ant-v5", num_envs=37, num_threads=3)
    for iteration in range(2):
        one, other = alone.whole_rollout(iteration), shared.whole_rollout(iteration)
        assert_same(one, other)
        assert torch.equal(one.rewards, other.rewards)
    shared.simulator.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_unstable_world_is_counted_and_restarted(num_threads):
    collector = Collector("Ant-v5", num_threads=num_threads)
    collector.env._physics.fields["qpos"][4, 0] = np.nan
    rollout = collector.whole_rollout(0)
    assert rollout.terminated[0].nonzero().flatten().tolist() == [4]
    assert rollout.rewards[0, 4] == 0.0
    step, ids, final_obs = rollout.finals[0]
    assert (step, ids.tolist()) == (0, [4])
    assert torch.equal(final_obs[0], rollout.raw_obs[0, 4])  # the last one before the step
    assert not torch.equal(rollout.raw_obs[1, 4], rollout.raw_obs[0, 4])
    for values in (rollout.raw_obs, rollout.rewards, rollout.last_obs):
        assert torch.isfinite(values).all()
    assert collector.env.sim_errors == {"unstable": 1}
    assert collector.simulator.take_sim_errors() == {"faults_unstable": 1.0}
    collector.simulator.close()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_profile_tells_acting_from_physics(tmp_path, num_threads):
    collector = Collector("Ant-v5", num_threads=num_threads, max_episode_steps=17)
    with profiler.profile(tmp_path / "profile"):
        collector.whole_rollout(0)
    collector.whole_rollout(1)  # after the profile: no times are noted any more
    collector.simulator.close()
    (process,) = read_profile(tmp_path / "profile").processes
    acts = 0
    for thread in process.threads:
        events = thread.events
        within = events[events["category"] == Category.SIMULATOR]
        act = events[events["category"] == Category.KERNEL_ACT]
        for start, end in zip(act["start"].tolist(), act["end"].tolist(), strict=True):
            assert ((within["start"] <= start) & (start < end) & (end <= within["end"])).sum() == 1
        assert (act["start"][1:] >= act["end"][:-1]).all()
        acts += len(act)
        assert (act["end"] - act["start"]).sum() <= (within["end"] - within["start"]).sum()
    assert acts > 0  # every group of worlds acts once a step
    assert acts % STEPS == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_action_that_is_not_finite_is_named(value):
    collector = Collector("Ant-v5")
    with torch.no_grad():
        collector.policy.model.policy[-1].bias[2] = value
    with pytest.raises(SimulationError, match=rf"environment {FIRST}\D.*action"):
        collector.whole_rollout(0)


def test_finite_weights_that_overflow_end_a_rollout_as_they_end_a_stepwise_one():
    """The overflow is infinite in one order of additions and NaN in another."""
    collector = Collector("Ant-v5")
    with torch.no_grad():
        collector.policy.model.policy[0].weight.mul_(1e10)
        collector.policy.model.policy[-1].weight.mul_(1e36)
    for collect_rollout in (collector.whole_rollout, collector.stepwise_rollout):
        with pytest.raises(SimulationError, match=rf"environment {FIRST}\D.*action"):
            collect_rollout(0)


def test_a_task_that_cannot_be_compiled_is_stepped(monkeypatch, caplog):
    from rayagi.envs.mujoco_cpu.tasks import GymnasiumAnt

    monkeypatch.setattr(
        GymnasiumAnt, "forward_position", lambda self, compiled, fields: np.cosh(fields["qpos"][:, 0])
    )
    kernels._log_once.cache_clear()
    caplog.set_level("INFO", logger="rayagi")
    env = make_env_factory("Ant-v5")(num_envs=2, first_env_index=0, seed=0, num_threads=1)
    assert not isinstance(env, RolloutMujocoVecEnv)
    assert (
        "Ant-v5 is stepped from Python: a task's formulas: numpy's cosh cannot be compiled yet" in caplog.text
    )
