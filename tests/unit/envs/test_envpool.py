"""EnvPool itself, where it is installed, against Gymnasium's environments step by step."""

import importlib.util

import gymnasium
import numpy as np
import pytest
import torch

from rayagi.envs import (
    EnvironmentOptionError,
    UnsupportedSpaceError,
    env_info,
    has_pictures,
    make_env_factory,
)
from rayagi.envs.errors import SimulationError

installed = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None,
    reason="EnvPool is not installed: pip install 'rayagi[envpool]'",
)


def make(env_id="CartPole-v1", *, num_envs=4, first=0, seed=3, threads=2, **options):
    factory = make_env_factory(env_id, engine="envpool", kwargs=options)
    return factory(num_envs=num_envs, first_env_index=first, seed=seed, num_threads=threads)


def course(env, num_steps, actions):
    """First observations, and everything that the steps returned."""
    results = [env.reset()]
    for t in range(num_steps):
        step = env.step(actions(t))
        results += [step.obs, step.rewards, step.terminated, step.truncated, step.final_ids, step.final_obs]
    env.close()
    return results


def same(results, others):
    return all(torch.equal(one, other) for one, other in zip(results, others, strict=True))


@installed
def test_images_are_flat_parts_that_a_cnn_encodes_and_are_those_of_the_pool():
    import envpool

    info = env_info("Pong-v5", "envpool", {"max_episode_steps": 40})
    (part,) = info.obs_parts
    assert (part.channels_height_width, part.scale, info.obs_dim) == ((4, 84, 84), 1 / 255, 4 * 84 * 84)
    env = make("Pong-v5", num_envs=2, max_episode_steps=40)
    found = course(env, 45, lambda t: torch.tensor([t % 6, 3]))  # past the reset after 40 steps
    seeds = [seed % 2**31 for seed in make("Pong-v5", num_envs=2)._next_seeds(3)]
    raw = envpool.make("Pong-v5", env_type="gymnasium", num_envs=2, seed=seeds, max_episode_steps=40)
    expected = [raw.reset()[0], *(raw.step(np.array([t % 6, 3]))[0] for t in range(39))]
    for obs, image in zip([found[0], *found[1::6]], expected, strict=False):
        assert torch.equal(obs, torch.from_numpy(image.reshape(2, -1)))


@installed
@pytest.mark.parametrize(
    ("env_id", "options", "frames"),
    [
        ("Pong-v5", {}, 4),
        ("Breakout-v5", {"stack_num": 2, "gray_scale": False, "episodic_life": True}, 2),
        ("Hopper-v5", {"frame_stack": 3}, 3),
        ("Hopper-v5", {}, 1),
    ],
)
def test_an_observation_has_all_frames_of_the_one_before_it_but_the_first(env_id, options, frames):
    info = env_info(env_id, "envpool", options)
    assert info.frames == frames
    env, generator, ends = make(env_id, **options), torch.Generator().manual_seed(0), 0
    before = env.reset().view(4, frames, -1)
    for _ in range(300):
        actions = torch.rand(4, info.action.dim, generator=generator) * 2 - 1
        if info.action.is_discrete:
            actions = torch.randint(info.action.num_choices, (4,), generator=generator)
        step = env.step(actions)
        after = step.obs.clone().view(4, frames, -1)
        after[step.final_ids] = step.final_obs.view(-1, frames, after.shape[-1])
        assert torch.equal(after[:, :-1], before[:, 1:])
        before, ends = step.obs.view(4, frames, -1), ends + len(step.final_ids)
    env.close()
    assert ends > 0 or env_id == "Pong-v5"


@installed
def test_a_task_that_only_envpool_has_names_the_engine_and_has_no_frames():
    with pytest.raises(EnvironmentOptionError, match="Pong-v5: use engine envpool, which alone has it"):
        env_info("Pong-v5")
    assert not has_pictures("Pong-v5")
    assert has_pictures("Ant-v5")  # EnvPool's is Gymnasium's


@installed
def test_every_step_is_one_of_the_task_and_final_observations_are_exact():
    # The reference: Gymnasium's CartPole, put where the pool's environment was, makes the same step.
    env, reference = make(max_episode_steps=15), gymnasium.make("CartPole-v1").unwrapped
    reference.reset(seed=0)
    obs, lengths, ends = env.reset(), np.zeros(4, dtype=int), []
    for _ in range(60):
        actions = torch.tensor([0, 1, int(obs[2, 2] > 0), int(obs[3, 2] > 0)])  # two fall, two are held
        step = env.step(actions)
        lengths += 1
        final = dict(zip(step.final_ids.tolist(), step.final_obs, strict=True))
        for i in range(4):
            reference.state, reference.steps_beyond_terminated = obs[i].double().numpy(), None
            expected, reward, terminated, _, _ = reference.step(int(actions[i]))
            at_limit = lengths[i] == 15
            assert float(step.rewards[i]) == reward
            assert bool(step.truncated[i]) == at_limit
            assert bool(step.terminated[i]) == (terminated and not at_limit)
            assert (i in final) == (terminated or at_limit)
            np.testing.assert_allclose(final.get(i, step.obs[i]), expected, atol=1e-5)
            if i in final:
                assert step.obs[i].abs().max() <= 0.05  # where CartPole begins
                ends.append((bool(step.terminated[i]), int(lengths[i])))
                lengths[i] = 0
        obs = step.obs
    env.close()
    assert {length for terminated, length in ends if not terminated} == {15}
    assert any(terminated for terminated, _ in ends)


@installed
def test_layout_and_threads_make_no_difference():
    def actions(rows):
        return lambda t: torch.tensor([(t // 3 + i) % 2 for i in rows])

    whole = course(make(num_envs=3, threads=2), 40, actions(range(3)))
    assert same(whole, course(make(num_envs=3, threads=1), 40, actions(range(3))))
    part = course(make(num_envs=2, first=1), 40, actions((1, 2)))
    assert torch.equal(part[0], whole[0][1:])
    assert all(torch.equal(part[1 + 6 * t], whole[1 + 6 * t][1:]) for t in range(40))
    assert not same(whole[:1], course(make(num_envs=3, seed=4), 0, actions(range(3))))


@installed
def test_a_saved_state_resumes_with_new_episodes():
    env = make()
    first, state = env.reset(), env.state_dict()
    second = env.load_state_dict(state)
    assert not torch.equal(first, second)
    assert not env.resumes_episodes
    with pytest.raises(EnvironmentOptionError, match="holds 4 environments, not 2"):
        make(num_envs=2).load_state_dict(state)
    env.close()


@installed
def test_robots_have_gymnasiums_sizes_and_clipped_actions():
    ours, theirs = env_info("Ant-v5", engine="envpool"), env_info("Ant-v5", engine="mujoco_cpu")
    assert (ours.obs_dim, ours.action, ours.max_episode_steps) == (
        theirs.obs_dim,
        theirs.action,
        theirs.max_episode_steps,
    )
    assert env_info("Ant-v5", engine="envpool", kwargs={"max_episode_steps": -1}).max_episode_steps is None
    wide, narrow = (
        course(make("Ant-v5", num_envs=2), 2, lambda t, size=size: torch.full((2, 8), size))
        for size in (5.0, 1.0)
    )
    assert same(wide, narrow)
    env = make("Ant-v5", num_envs=2)
    env.reset()
    with pytest.raises(
        SimulationError, match="environment 0 became unstable in step 1 of its episode: action"
    ):
        env.step(torch.full((2, 8), float("nan")))
    env.close()


@installed
@pytest.mark.parametrize(
    ("env_id", "options", "error", "reason"),
    [
        ("Foo-v0", {}, Exception, "no environment is called 'Foo-v0'"),
        ("rayagi/Ant-v0", {}, EnvironmentOptionError, "envpool does not have it"),
        (
            "CartPole-v1",
            {"nonsense": 1},
            EnvironmentOptionError,
            "there is no option nonsense; EnvPool's has .*max_episode_steps",
        ),
        ("CartPole-v1", {"batch_size": 2}, EnvironmentOptionError, "batch_size is set by rayagi"),
        ("CartPole-v1", {"max_episode_steps": 0}, EnvironmentOptionError, "must be a positive integer"),
        ("FrozenLake-v1", {}, UnsupportedSpaceError, "of observations"),
    ],
)
def test_invalid_environments_and_options_are_rejected(env_id, options, error, reason):
    with pytest.raises(error, match=reason):
        env_info(env_id, engine="envpool", kwargs=options)


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    for module in ("rayagi.envs.providers", "rayagi.envs.envpool_provider"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == "envpool" else find(name))
    with pytest.raises(EnvironmentOptionError, match=r"pip install 'rayagi\[envpool\]'"):
        make_env_factory("CartPole-v1", engine="envpool")
    assert make_env_factory("CartPole-v1").engine == "gymnasium"  # no other engine needs it
