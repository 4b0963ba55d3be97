"""The batched tasks against Gymnasium's own environments."""

from __future__ import annotations

import dataclasses
import inspect

import gymnasium
import mujoco
import numpy as np
import pytest
from mujoco_parity import assert_same_trajectory, make_ours, make_theirs, random_actions, state_of

from actors.rollout import environment_generator
from rayagi.envs.mujoco_cpu.provider import TASKS

OPTIONS = [
    (
        "Ant-v5",
        {"include_cfrc_ext_in_observation": False, "exclude_current_positions_from_observation": False},
    ),
    ("Ant-v5", {"ctrl_cost_weight": 0.1, "contact_cost_weight": 0.3, "contact_force_range": (-20.0, 3.0)}),
    ("Ant-v5", {"main_body": "front_left_leg", "healthy_z_range": (0.5, 0.8), "frame_skip": 2}),
    ("HalfCheetah-v5", {"exclude_current_positions_from_observation": False, "forward_reward_weight": 2.5}),
    ("Hopper-v5", {"healthy_state_range": (-2.0, 2.0), "healthy_angle_range": (-1.0, 1.0)}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_reward": 3.0}),
    ("Walker2d-v5", {"healthy_z_range": (1.1, 1.3), "exclude_current_positions_from_observation": False}),
    ("Swimmer-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.7}),
    ("Humanoid-v5", {"include_cinert_in_observation": False, "contact_cost_weight": 1e-2}),
    ("Humanoid-v5", {"include_cfrc_ext_in_observation": False, "include_cvel_in_observation": False}),
    ("HumanoidStandup-v5", {"include_qfrc_actuator_in_observation": False, "impact_cost_weight": 1e-3}),
    ("InvertedDoublePendulum-v5", {"healthy_reward": 2.0}),
    ("Reacher-v5", {"reward_dist_weight": 3.0, "reward_control_weight": 0.2}),
    ("Pusher-v5", {"reward_near_weight": 2.0, "reward_dist_weight": 0.3, "reward_control_weight": 1.0}),
]


def check_from_random_states(env_id: str, **kwargs) -> None:
    rng = np.random.default_rng(7)
    theirs = make_theirs(env_id, 3, **kwargs)
    ours = make_ours(env_id, 3, **kwargs)
    ours.reset()
    for warm_up in (1, 12, 40):
        for i, env in enumerate(theirs):
            env.reset(seed=warm_up * 10 + i)
            for _ in range(warm_up + i):
                if env.step(random_actions(theirs, rng)[0])[2]:  # fallen: the next step would end at once
                    env.reset()
        ours.load_state_dict(state_of(theirs, ours))
        assert_same_trajectory(ours, theirs, 20, rng)
    ours.close()


@pytest.mark.parametrize("env_id", TASKS)
def test_twenty_steps_from_random_states_equal_gymnasiums(env_id):
    check_from_random_states(env_id)


@pytest.mark.parametrize(("env_id", "kwargs"), OPTIONS)
def test_constructor_options_mean_what_they_mean_in_gymnasium(env_id, kwargs):
    check_from_random_states(env_id, **kwargs)


@pytest.mark.parametrize("env_id", TASKS)
def test_twenty_steps_from_our_own_reset_equal_gymnasiums(env_id):
    ours, theirs = make_ours(env_id, 3), make_theirs(env_id, 3)
    obs = ours.reset_raw()
    for i, env in enumerate(theirs):
        mujoco.mj_resetData(env.model, env.data)
        env.set_state(ours._physics.fields["qpos"][i], ours._physics.fields["qvel"][i])
        np.testing.assert_allclose(obs[i], env._get_obs(), rtol=1e-9, atol=1e-9)
    assert_same_trajectory(ours, theirs, 20, np.random.default_rng(1))


@pytest.mark.parametrize("env_id", TASKS)
def test_a_reset_draws_what_gymnasium_draws_from_the_same_generator(env_id):
    ours, (theirs,) = make_ours(env_id, 2, first=5, seed=11), make_theirs(env_id, 1)
    for _ in range(3):
        obs = ours.reset_raw()
        theirs.np_random = environment_generator(11, 6, "reset", int(ours._episode[1]))
        want, _ = theirs.reset()
        np.testing.assert_allclose(obs[1], want, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(ours._physics.fields["qpos"][1], theirs.data.qpos)
        np.testing.assert_array_equal(ours._physics.fields["qvel"][1], theirs.data.qvel)


@pytest.mark.parametrize("env_id", TASKS)
def test_constructor_defaults_are_gymnasiums(env_id):
    theirs = inspect.signature(make_theirs(env_id, 1)[0].__class__.__init__).parameters
    expected = {
        name: parameter.default
        for name, parameter in theirs.items()
        if name not in {"self", "kwargs", "default_camera_config"}
    }
    assert {f.name: f.default for f in dataclasses.fields(TASKS[env_id])} == expected


@pytest.mark.parametrize("env_id", TASKS)
def test_sizes_limits_and_action_range_are_the_registered_ones(env_id):
    ours, (theirs,) = make_ours(env_id, 1), make_theirs(env_id, 1)
    assert ours.info.obs_dim == theirs.observation_space.shape[0]
    assert ours.info.action.dim == theirs.action_space.shape[0]
    assert ours.info.max_episode_steps == gymnasium.spec(env_id).max_episode_steps
    np.testing.assert_array_equal(np.float32(ours.info.action.low), theirs.action_space.low)
    np.testing.assert_array_equal(np.float32(ours.info.action.high), theirs.action_space.high)


def test_contact_forces_are_observed():
    rng = np.random.default_rng(0)
    ours, theirs = make_ours("Ant-v5", 4), make_theirs("Ant-v5", 4)
    ours.reset()
    largest = max(np.abs(ours.step_raw(random_actions(theirs, rng)).obs[:, 27:]).max() for _ in range(40))
    assert largest == 1.0
