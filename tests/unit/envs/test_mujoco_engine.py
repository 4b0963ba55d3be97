"""MujocoVecEnv: ends of episodes, randomness by global index, exact continuation, errors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from mujoco_parity import make_ours, make_theirs, random_actions, state_of

from rayagi.envs import EnvironmentOptionError, SimulationError
from rayagi.envs.mujoco_cpu.provider import TASKS

BOTH_PHYSICS = ["Ant-v5", "InvertedDoublePendulum-v5"]
STATE_ARRAYS = ("obs", "rewards", "terminated", "truncated", "final_ids", "final_obs")


def actions_for(env, num_steps, num_envs=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_steps, num_envs or env.num_envs, env.info.action.dim)
    return torch.rand(shape, generator=generator) * 2 - 1


def run(env, actions):
    return [env.step(a) for a in actions]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        for name in STATE_ARRAYS:
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_a_step_gives_float32_and_bool_tensors_of_the_documented_shapes():
    env = make_ours("Hopper-v5", 3)
    assert env.reset().shape == (3, 11)
    step = env.step(torch.zeros(3, 3))
    assert (step.obs.dtype, step.rewards.dtype, step.final_obs.dtype) == (torch.float32,) * 3
    assert (step.terminated.dtype, step.truncated.dtype, step.final_ids.dtype) == (
        torch.bool,
        torch.bool,
        torch.int64,
    )
    assert step.final_obs.shape == (0, 11)


def test_later_steps_do_not_overwrite_what_earlier_ones_returned():
    env = make_ours("Ant-v5", 2)
    first = env.reset()
    kept = first.clone()
    steps = run(env, actions_for(env, 3))
    assert torch.equal(first, kept)
    assert not torch.equal(steps[0].obs, steps[1].obs)


@pytest.mark.parametrize(("env_id", "limit"), [("Reacher-v5", 50), ("Pusher-v5", 100)])
def test_the_registered_time_limit_truncates(env_id, limit):
    env = make_ours(env_id, 2)
    env.reset()
    steps = run(env, actions_for(env, limit + 1))
    assert [bool(s.truncated.any()) for s in steps] == [False] * (limit - 1) + [True, False]
    assert steps[limit - 1].truncated.all()
    assert not steps[limit - 1].terminated.any()


def test_the_final_observation_is_the_one_before_the_reset():
    env, theirs = make_ours("HalfCheetah-v5", 2, max_episode_steps=4), make_theirs("HalfCheetah-v5", 2)
    rng = np.random.default_rng(0)
    env.reset()
    for t in theirs:
        t.reset(seed=1)
    env.load_state_dict(state_of(theirs, env))
    for step in range(4):
        actions = random_actions(theirs, rng)
        got = env.step_raw(actions)
        want = [t.step(a)[0] for t, a in zip(theirs, actions, strict=True)]
        assert got.final_ids.tolist() == ([0, 1] if step == 3 else [])
    np.testing.assert_allclose(got.final_obs, want, rtol=1e-9, atol=1e-9)
    assert np.abs(got.obs - got.final_obs).max() > 0.01
    assert np.abs(got.obs[:, :8]).max() <= 0.1


def test_minus_one_removes_the_time_limit():
    env = make_ours("Reacher-v5", 1, max_episode_steps=-1)
    assert env.info.max_episode_steps is None
    env.reset()
    assert not any(bool(s.truncated) for s in run(env, actions_for(env, 60)))


def test_an_environment_restarts_alone():
    env = make_ours("InvertedPendulum-v5", 4)
    env.reset()
    for actions in actions_for(env, 300) * 3:
        step = env.step(actions)
        ended = step.final_ids.tolist()
        assert ended == torch.nonzero(step.terminated | step.truncated).flatten().tolist()
        assert (step.obs[ended].abs() <= 0.01).all()
        assert (step.final_obs[:, 1].abs() > 0.2).all()
        if 0 < len(ended) < 4:
            return
    raise AssertionError("all environments ended in the same step, or none in 300 steps")


def test_actions_are_clipped_to_the_action_range():
    one, other = make_ours("Ant-v5", 2), make_ours("Ant-v5", 2)
    assert torch.equal(one.reset(), other.reset())
    assert_same([one.step(torch.full((2, 8), 9.0))], [other.step(torch.ones(2, 8))])


@pytest.mark.parametrize("env_id", TASKS)
def test_two_threads_give_the_bits_of_one(env_id):
    one, two = make_ours(env_id, 5, threads=1), make_ours(env_id, 5, threads=2)
    assert torch.equal(one.reset(), two.reset())
    actions = actions_for(one, 30)
    assert_same(run(one, actions), run(two, actions))


@pytest.mark.parametrize("env_id", [*BOTH_PHYSICS, "Hopper-v5"])
def test_one_batch_of_four_equals_two_batches_of_two(env_id):
    whole = make_ours(env_id, 4)
    halves = [make_ours(env_id, 2, first=first) for first in (0, 2)]
    assert torch.equal(whole.reset(), torch.cat([h.reset() for h in halves]))
    ends = 0
    for actions in actions_for(whole, 120):
        step = whole.step(actions)
        parts = [half.step(a) for half, a in zip(halves, actions.split(2), strict=True)]
        for name in ("obs", "rewards", "terminated", "truncated", "final_obs"):
            assert torch.equal(getattr(step, name), torch.cat([getattr(p, name) for p in parts]))
        ends += len(step.final_ids)
    assert ends > 0


@pytest.mark.parametrize("env_id", BOTH_PHYSICS)
def test_the_seed_decides_the_trajectory(env_id):
    actions = actions_for(make_ours(env_id, 2), 40)
    first, again, other = (make_ours(env_id, 2, seed=seed) for seed in (1, 1, 2))
    starts = [env.reset() for env in (first, again, other)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert_same(run(first, actions), run(again, actions))


def test_episodes_and_environments_start_differently():
    env = make_ours("HalfCheetah-v5", 3)
    starts = torch.cat([env.reset(), env.reset()])
    assert len({tuple(row.tolist()) for row in starts}) == 6


@pytest.mark.parametrize("env_id", TASKS)
def test_a_saved_state_continues_bit_for_bit(env_id):
    actions = actions_for(make_ours(env_id, 3), 60)
    original = make_ours(env_id, 3)
    original.reset()
    last = run(original, actions[:25])[-1]
    saved = pickle.loads(pickle.dumps(original.state_dict()))
    rest = run(original, actions[25:])

    restored = make_ours(env_id, 3, threads=2)
    assert torch.equal(restored.load_state_dict(saved), last.obs)
    assert_same(run(restored, actions[25:]), rest)


def test_a_saved_state_is_a_copy():
    env = make_ours("Ant-v5", 2)
    env.reset()
    saved = env.state_dict()
    before = pickle.dumps(saved)
    run(env, actions_for(env, 3))
    assert pickle.dumps(saved) == before


def test_a_state_of_another_number_of_environments_raises():
    env = make_ours("Hopper-v5", 2)
    env.reset()
    with pytest.raises(EnvironmentOptionError, match="holds 2 environments, not 3; resume with num_envs=2"):
        make_ours("Hopper-v5", 3).load_state_dict(env.state_dict())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("env_id", BOTH_PHYSICS)
def test_an_action_that_is_not_finite_raises_with_the_environments_global_index(env_id, value):
    env = make_ours(env_id, 3, first=10)
    env.reset()
    env.step(torch.zeros(3, env.info.action.dim))
    actions = torch.zeros(3, env.info.action.dim)
    actions[2, 0] = value
    with pytest.raises(
        SimulationError, match="environment 12 became unstable in step 2 of its episode: action"
    ):
        env.step(actions)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("env_id", BOTH_PHYSICS)
def test_an_unstable_world_is_counted_and_restarted_and_leaves_no_log_file(
    env_id, threads, tmp_path, monkeypatch
):
    """The other worlds' trajectories do not change."""
    monkeypatch.chdir(tmp_path)
    theirs = make_theirs(env_id, 4)
    for i, env in enumerate(theirs):
        env.reset(seed=i)
    theirs[2].data.qvel[0] = 1e11
    env, healthy = (make_ours(env_id, 4, first=4, threads=threads) for _ in range(2))
    env.reset(), healthy.reset()
    state = state_of(theirs, env)
    theirs[2].data.qvel[0] = 0.0
    healthy.load_state_dict(state_of(theirs, env))
    before = env.load_state_dict(state)
    others = [0, 1, 3]
    for step in range(3):
        found, expected = (each.step(torch.zeros(4, each.info.action.dim)) for each in (env, healthy))
        if step == 0:
            assert found.terminated[2]
            assert not found.truncated[2]
            assert found.rewards[2] == 0.0
            assert torch.equal(found.final_obs[found.final_ids.tolist().index(2)], before[2])
        assert torch.isfinite(found.obs).all()
        assert found.obs.abs().max() < 1e3
        assert torch.equal(found.obs[others], expected.obs[others])
        assert torch.equal(found.rewards[others], expected.rewards[others])
    assert (env.sim_errors, healthy.sim_errors) == ({"unstable": 1}, {"unstable": 0})
    assert list(tmp_path.iterdir()) == []
    env.close()


def test_close_can_be_called_on_a_stepped_environment_of_many_threads():
    env = make_ours("Ant-v5", 4, threads=2)
    env.reset()
    run(env, actions_for(env, 1))
    env.close()
