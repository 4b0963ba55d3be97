"""TaskVecEnv of every task: threads, layouts, seeds, resuming, simulation errors, and user errors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import rayagi.envs as envs
from rayagi.envs.errors import ModelError
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.provider import TASKS
from rayagi.envs.tasks.random_uniforms import START, uniform
from rayagi.envs.tasks.task import MODELS


def make(task, num_envs=6, *, first=0, seed=3, threads=1, **options):
    factory = envs.make_env_factory(task, engine="mujoco_cpu", kwargs=options)
    return factory(num_envs=num_envs, first_env_index=first, seed=seed, num_threads=threads)


def actions_of(env, worlds, steps):
    """The same actions for the same global worlds, however they are split."""
    generator = torch.Generator().manual_seed(5)
    return [2.4 * torch.rand((worlds, env.info.action.dim), generator=generator) - 1.2 for _ in range(steps)]


def course(env, actions, *, begin=True):
    """Everything that an environment returns, one step after another."""
    out = [env.reset()] if begin else []
    for action in actions:
        step = env.step(action)
        out += [step.obs, step.rewards, step.terminated, step.truncated, step.final_ids, step.final_obs]
    return [tensor.clone() for tensor in out]


def assert_equal(one, other):
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("task", TASKS)
def test_two_threads_give_what_one_gives_to_the_last_bit(task):
    one, two = make(task), make(task, threads=2)
    actions = actions_of(one, 6, 30)
    assert_equal(course(one, actions), course(two, actions))


@pytest.mark.parametrize("task", TASKS)
def test_a_world_does_not_depend_on_which_neighbours_it_has(task):
    # With a limit of nine steps all of them are reset three times.
    whole = make(task, max_episode_steps=9)
    parts = [
        make(task, 2, max_episode_steps=9),
        make(task, 1, first=2, max_episode_steps=9),
        make(task, 3, first=3, max_episode_steps=9),
    ]
    actions = actions_of(whole, 6, 30)
    obs = whole.reset()
    torch.testing.assert_close(torch.cat([part.reset() for part in parts]), obs, rtol=0, atol=0)
    for action in actions:
        want = whole.step(action)
        got = [part.step(rows) for part, rows in zip(parts, action.split([2, 1, 3]), strict=True)]
        for name in ("obs", "rewards", "terminated", "truncated", "final_obs"):
            joined = torch.cat([getattr(step, name) for step in got])
            torch.testing.assert_close(joined, getattr(want, name), rtol=0, atol=0)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_reproduces_the_trajectory_and_another_seed_differs(task):
    first, again, other = make(task), make(task), make(task, seed=4)
    actions = actions_of(first, 6, 5)
    reference = course(first, actions)
    assert_equal(reference, course(again, actions))
    assert not torch.equal(reference[0], other.reset())


@pytest.mark.parametrize("task", TASKS)
def test_a_resumed_trajectory_is_bit_identical(task):
    env = make(task, max_episode_steps=17)
    actions = actions_of(env, 6, 40)
    course(env, actions[:10])
    state = copy.deepcopy(env.state_dict())
    rest = course(env, actions[10:], begin=False)
    resumed = make(task, seed=3, max_episode_steps=17)
    obs = resumed.load_state_dict(state)
    assert obs.shape == (6, env.info.obs_dim)
    assert_equal(course(resumed, actions[10:], begin=False), rest)


@pytest.mark.parametrize("task", TASKS)
def test_sizes_and_ranges_are_those_that_it_declares(task):
    env = make(task)
    obs = env.reset()
    assert obs.shape == (6, env.info.obs_dim)
    assert obs.dtype == torch.float32
    step = env.step(actions_of(env, 6, 1)[0])
    assert step.obs.dtype == step.rewards.dtype == torch.float32
    assert step.rewards.shape == step.terminated.shape == step.truncated.shape == (6,)
    assert torch.isfinite(step.obs).all()


@pytest.mark.parametrize("task", TASKS)
def test_actions_beyond_the_range_are_clipped_to_it(task):
    clipped, beyond = make(task), make(task)
    actions = [3.0 * action for action in actions_of(clipped, 6, 5)]
    assert_equal(course(clipped, [action.clamp(-1, 1) for action in actions]), course(beyond, actions))


@pytest.mark.parametrize("task", TASKS)
def test_an_unstable_world_is_counted_and_reset_without_effect_on_others(task):
    well, broken = make(task), make(task)
    actions = actions_of(well, 6, 12)
    course(well, actions[:5])
    before = course(broken, actions[:5])[-6]
    state = broken.state_dict()
    state["worlds"]["qvel"][2, -1] = np.nan
    broken.load_state_dict(state)
    want, got = well.step(actions[5]), broken.step(actions[5])
    assert broken.sim_errors == {"unstable": 1, "contact overflow": 0, "constraint overflow": 0}
    assert well.sim_errors["unstable"] == 0
    assert bool(got.terminated[2])
    assert float(got.rewards[2]) == 0.0
    row = got.final_ids.tolist().index(2)
    torch.testing.assert_close(got.final_obs[row], before[2], rtol=0, atol=0)
    others = [0, 1, 3, 4, 5]
    for action in actions[6:]:
        torch.testing.assert_close(got.obs[others], want.obs[others], rtol=0, atol=0)
        torch.testing.assert_close(got.rewards[others], want.rewards[others], rtol=0, atol=0)
        assert torch.isfinite(got.obs).all()
        want, got = well.step(action), broken.step(action)
    assert broken.sim_errors["unstable"] == 1


@pytest.mark.parametrize("task", TASKS)
def test_an_action_that_is_not_finite_is_refused_with_its_place(task):
    env = make(task, first=40)
    env.reset()
    actions = actions_of(env, 6, 2)
    env.step(actions[0])
    actions[1][4, 1] = torch.nan
    with pytest.raises(envs.SimulationError, match="environment 44 became unstable in step 2"):
        env.step(actions[1])


@pytest.mark.parametrize("task", TASKS)
def test_an_unknown_option_names_those_that_there_are(task):
    with pytest.raises(
        envs.EnvironmentOptionError, match=r"no option gravity; it has max_episode_steps, xml_file"
    ):
        envs.make_env_factory(task, kwargs={"gravity": 1.0})


@pytest.mark.parametrize("value", [0, -1, 2.0, "2"])
def test_a_frame_skip_that_is_no_count_is_refused(value):
    with pytest.raises(envs.EnvironmentOptionError, match="frame_skip is"):
        envs.make_env_factory("rayagi/Ant-v0", kwargs={"frame_skip": value})


def test_the_engine_must_be_one_that_has_it():
    with pytest.raises(envs.EnvironmentOptionError, match="gymnasium does not have it"):
        envs.make_env_factory("rayagi/Ant-v0", engine="gymnasium")
    with pytest.raises(envs.EnvironmentOptionError, match="there is no engine 'physx'"):
        envs.make_env_factory("rayagi/Ant-v0", engine="physx")


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (
            '<motor name="back_left_hip" joint="back_left_hip"/>',
            r"it lacks the actuator back_left_hip \(it has ",
        ),
        (
            '<force name="front_left_foot_force" site="front_left_foot"/>',
            r"it lacks the sensor front_left_foot_force \(it has ",
        ),
    ],
)
def test_a_users_model_that_lacks_a_part_is_refused_with_its_file_and_the_part(cut, reason, tmp_path):
    text = (MODELS / "ant.xml").read_text()
    assert cut in text
    path = tmp_path / "mine.xml"
    path.write_text(text.replace(cut, ""))
    for use in (make, lambda task, **options: envs.env_info(task, kwargs=options)):
        with pytest.raises(ModelError, match=rf"mine\.xml: {reason}"):
            use("rayagi/Ant-v0", xml_file=str(path))


def test_a_users_model_that_is_missing_or_no_model_is_refused_with_its_file(tmp_path):
    with pytest.raises(ModelError, match=r"none\.xml: there is no such file"):
        make("rayagi/Ant-v0", xml_file=str(tmp_path / "none.xml"))
    (tmp_path / "bad.xml").write_text("<mujoco><worldbody><body></mujoco>")
    with pytest.raises(ModelError, match=r"bad\.xml: XML"):
        make("rayagi/Ant-v0", xml_file=str(tmp_path / "bad.xml"))


def test_the_time_limit_truncates_and_returns_the_final_observation():
    env, longer = make("rayagi/Ant-v0", max_episode_steps=4), make("rayagi/Ant-v0", max_episode_steps=-1)
    actions = [0.0 * action for action in actions_of(env, 6, 4)]
    course(env, actions[:3])
    course(longer, actions[:3])
    step, going_on = env.step(actions[3]), longer.step(actions[3])
    assert step.truncated.all()
    assert not step.terminated.any()
    assert not going_on.truncated.any()
    torch.testing.assert_close(step.final_obs, going_on.obs, rtol=0, atol=0)
    assert longer.info.max_episode_steps is None


def mixed(z):
    """SplitMix64's mixer, in Python's own integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5])
def test_draws_are_splitmix64_of_seed_world_episode_and_step(seed):
    weyl = 0x9E3779B97F4A7C15
    got = uniform(seed, torch.tensor([0, 9]), torch.tensor([0, 4]), START, 3)
    for row, (world, episode) in enumerate([(0, 0), (9, 4)]):
        state = mixed((world * weyl + seed) % 2**64)
        state = mixed((state + (episode + 1) * weyl) % 2**64)
        state = mixed((state + (START + 2) * weyl) % 2**64)
        want = [(mixed((state + k * weyl) % 2**64) >> 40) / 2**24 for k in (1, 2, 3)]
        assert got[row].tolist() == want


def test_draws_are_evenly_spread():
    numbers = uniform(1, torch.arange(500), torch.zeros(500, dtype=torch.int64), 3, 40).flatten()
    # 20,000 numbers: the mean's standard error is 0.002, a tenth's count has a standard deviation of 42.
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    counts = torch.histc(numbers, 10, 0.0, 1.0)
    assert (counts - 2000).abs().max() < 200


@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("compiled", [True, False])
def test_reward_terms_add_up_to_the_reward(env_id, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setenv("CC", "no-such-compiler")
    env = make(env_id, 16)
    assert isinstance(env, CompiledTaskVecEnv) == compiled
    env.reset()
    generator = torch.Generator().manual_seed(4)
    shape = (16, env.info.action.dim)
    for _ in range(40):
        step = env.step(2.0 * torch.rand(shape, generator=generator) - 1.0)
        assert step.reward_terms.shape == (16, len(env.info.reward_terms))
        total = step.reward_terms.sum(-1)
        if env_id == "rayagi/BallBalance-v0":  # its factors
            total = step.reward_terms.prod(-1)
        if env_id == "rayagi/Anymal-v0":  # never below 0
            total = total.clamp(min=0.0)
        torch.testing.assert_close(total, step.rewards, rtol=1e-5, atol=1e-5)
