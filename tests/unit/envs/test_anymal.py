"""Anymal: observations, rewards and terminations of hand-computed states, and a comparison with a plain MuJoCo loop."""

from __future__ import annotations

import math
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from single_world import copy_of, make_envs, random_actions, reward_of, without

from rayagi.envs.errors import ModelError
from rayagi.envs.tasks.anymal import Anymal, AnymalRules
from rayagi.envs.tasks.task import State

TASK = "rayagi/Anymal-v0"
STANDING = np.array([0.03, 0.4, -0.8, 0.03, -0.4, 0.8, -0.03, 0.4, -0.8, -0.03, -0.4, 0.8])
LEGS = ("LF", "LH", "RF", "RH")
HALF = math.sqrt(0.5)


@pytest.fixture(scope="module")
def rules() -> AnymalRules:
    task = Anymal()
    return task.rules(task.load(), device=torch.device("cpu"), dtype=torch.float64)


def state(
    num_worlds: int = 1,
    *,
    turned: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0),
    velocity: tuple[float, ...] = (0.0, 0.0, 0.0),
    angular: tuple[float, ...] = (0.0, 0.0, 0.0),
    commands: tuple[float, ...] = (0.0, 0.0, 0.0),
    torque: float = 0.0,
) -> State:
    """Standing 0.55 m high in the default pose."""
    qpos = torch.tensor([[0.0, 0.0, 0.55, *turned, *STANDING]], dtype=torch.float64)
    qvel = torch.tensor([[*velocity, *angular, *[0.0] * 12]], dtype=torch.float64)
    fields = {
        "qpos": qpos.repeat(num_worlds, 1),
        "qvel": qvel.repeat(num_worlds, 1),
        "actuator_force": torch.full((num_worlds, 12), torque, dtype=torch.float64),
        "sensordata": torch.zeros((num_worlds, 5), dtype=torch.float64),
    }
    memory = {"commands": torch.tensor([commands], dtype=torch.float64).repeat(num_worlds, 1)}
    actions = torch.zeros((num_worlds, 12), dtype=torch.float64)
    return State(fields, memory, actions, torch.zeros((num_worlds, 0), dtype=torch.float64))


def test_vectors_are_in_the_base_frame(rules):
    # Turned to the left by a right angle: what goes along the world's y goes ahead. 2 x 1.5 m/s.
    obs = rules.observe(state(turned=(HALF, 0, 0, HALF), velocity=(0.0, 1.5, 0.25)))[0]
    torch.testing.assert_close(obs[:3], torch.tensor([3.0, 0.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(obs[6:9], torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))
    # Nose down by a right angle: gravity pulls ahead, and a fall is a way ahead.
    obs = rules.observe(state(turned=(HALF, 0, HALF, 0), velocity=(0.0, 0.0, -1.0)))[0]
    torch.testing.assert_close(obs[:3], torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(obs[6:9], torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    # Rolled to the right by a right angle: its left side is up, so that gravity pulls to the right.
    obs = rules.observe(state(turned=(HALF, HALF, 0, 0)))[0]
    torch.testing.assert_close(obs[6:9], torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64))


def test_scales_of_the_other_fields(rules):
    given = state(angular=(0.4, 0.8, -1.2), commands=(1.0, -0.5, 0.2))
    given.fields["qpos"][0, 7:] += 0.1 * torch.arange(12)
    given.fields["qvel"][0, 6:] = 2.0
    given.actions[0] = torch.linspace(-1.0, 1.0, 12)
    obs = rules.observe(given)
    assert obs.shape == (1, 48)
    want = [0.1, 0.2, -0.3, 0.0, 0.0, -1.0, 2.0, -1.0, 0.05]
    torch.testing.assert_close(obs[0, 3:12], torch.tensor(want, dtype=torch.float64))
    torch.testing.assert_close(obs[0, 12:24], 0.1 * torch.arange(12, dtype=torch.float64))
    torch.testing.assert_close(obs[0, 24:36], torch.full((12,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(obs[0, 36:], given.actions[0])


def test_reward_by_hand(rules):
    # Half a metre per second too slow and half a radian per second off: exp(-0.25 / 0.25) + 0.5 exp(-0.25 / 0.25),
    # less 12 x 10^2 x 2.5e-5 = 0.03. Turned to the left, so that ahead is the world's y; up and down do not count.
    slow = state(
        turned=(HALF, 0, 0, HALF),
        velocity=(-0.5, 0.5, 3.0),
        angular=(9.0, 9.0, 0.0),
        commands=(1.0, 0.5, -0.5),
        torque=10.0,
    )
    assert float(rules.reward_and_done(slow).rewards) == pytest.approx(1.5 * math.exp(-1.0) - 0.03, abs=1e-12)
    perfect = state(velocity=(1.0, 0.5, 0.0), angular=(0.0, 0.0, -0.5), commands=(1.0, 0.5, -0.5))
    assert float(rules.reward_and_done(perfect).rewards) == pytest.approx(1.5, abs=1e-12)
    # 12 x 80^2 x 2.5e-5 = 1.92 exceeds the largest reward.
    assert float(rules.reward_and_done(state(torque=80.0)).rewards) == 0.0


def test_terminates_on_contact_of_the_base_or_a_knee(rules):
    given = state(7)
    given.fields["sensordata"][1:6] = 1.01 * torch.eye(5, dtype=torch.float64)
    given.fields["sensordata"][6] = 0.99
    assert rules.reward_and_done(given).terminated.tolist() == [False, *[True] * 5, False]


def test_actions_move_targets_around_the_default_pose(rules):
    given = state()
    given.actions[0, 1], given.actions[0, 2] = 1.0, -0.5
    targets, _ = rules.control(given)
    want = torch.tensor(STANDING)
    want[1], want[2] = 0.9, -1.05
    torch.testing.assert_close(targets[0], want)


def test_range_of_starts(rules):
    least, middle, most = (
        rules.start(torch.full((1, 27), share, dtype=torch.float64)) for share in (0.0, 0.5, 1.0)
    )
    for start, share in ((least, 0.5), (middle, 1.0), (most, 1.5)):
        want = torch.tensor([0.0, 0.0, 0.62, 1.0, 0.0, 0.0, 0.0, *(share * STANDING)])
        torch.testing.assert_close(start.qpos[0], want)
    for start, share in ((least, -1.0), (middle, 0.0), (most, 1.0)):
        torch.testing.assert_close(
            start.qvel[0], torch.tensor([0.0] * 6 + [0.1 * share] * 12, dtype=torch.float64)
        )
        want = share * torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
        torch.testing.assert_close(start.memory["commands"][0], want)


def test_commands_are_spread_over_their_range():
    env = make_envs(TASK, 512, max_speed_x=0.5)
    commands = env.reset()[:, 9:12] / torch.tensor([2.0, 2.0, 0.25])
    for values, limit in zip(commands.unbind(1), (0.5, 1.0, 1.0), strict=True):
        assert values.min() >= -limit
        assert values.max() <= limit
        # The mean of 512 uniform numbers has a standard deviation of limit / sqrt(3 x 512).
        assert abs(float(values.mean())) < 5 * limit / math.sqrt(3 * 512)
        assert float(values.std()) == pytest.approx(limit / math.sqrt(3), rel=0.1)


def test_stands_for_two_seconds():
    env = make_envs(TASK, 4)
    env.reset()
    for _ in range(100):
        step = env.step(torch.zeros(4, 12))
        assert not step.terminated.any()
    assert (env.fields["qpos"][:, 2] > 0.4).all()
    torch.testing.assert_close(
        step.obs[:, 6:9], torch.tensor([[0.0, 0.0, -1.0]]).repeat(4, 1), rtol=0, atol=0.1
    )


def test_ends_on_its_back():
    env = make_envs(TASK, 2)
    env.reset()
    begun = env.state_dict()
    begun["worlds"]["qpos"][1, 3:7] = [0.0, 1.0, 0.0, 0.0]
    env.load_state_dict(begun)
    for _ in range(50):
        step = env.step(torch.zeros(2, 12))
        assert not step.terminated[0]
        if step.terminated[1]:
            return
    pytest.fail("a robot on its back went on for a second")


def test_trajectory_equals_that_of_a_single_world(rules):
    """Observations, rewards and terminations over 20 steps from random states, against a plain MuJoCo loop and numpy."""
    env = make_envs(TASK, 6)
    env.reset()
    for step in range(12):
        env.step(0.4 * random_actions(6, 12, step))
    worlds = [copy_of(rules.model, env, i) for i in range(6)]
    commands = env.state_dict()["memory"]["commands"].numpy()
    running = set(range(6))
    for step in range(20):
        actions = random_actions(6, 12, 100 + step)
        got = env.step(actions)
        rewards = reward_of(rules, env)
        for i in sorted(running):
            action = np.clip(actions[i].double().numpy(), -1.0, 1.0)
            reward, ended, want = single_step(rules.model, worlds[i], action, commands[i])
            assert bool(got.terminated[i]) == ended
            assert float(got.rewards[i]) == pytest.approx(reward, rel=1e-6, abs=1e-6)
            if ended:  # the environment has been reset
                running.remove(i)
                found = got.final_obs[got.final_ids.tolist().index(i)]
                np.testing.assert_allclose(found.numpy(), want, rtol=1e-6, atol=1e-6)
                continue
            np.testing.assert_allclose(env.fields["qpos"][i].numpy(), worlds[i].qpos, atol=1e-9)
            np.testing.assert_allclose(env.state_dict()["obs"][i].numpy(), want, atol=1e-9)
            assert float(rewards[i]) == pytest.approx(reward, abs=1e-9)
    assert running


def single_step(model, data, action, command) -> tuple[float, bool, np.ndarray]:
    data.ctrl[:] = STANDING + 0.5 * action
    mujoco.mj_step(model, data, nstep=2)
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, data.qpos[3:7])
    to_base = matrix.reshape(3, 3).T
    velocity, gravity = to_base @ data.qvel[:3], to_base @ [0.0, 0.0, -1.0]
    obs = np.concatenate(
        (
            2 * velocity,
            0.25 * data.qvel[3:6],
            gravity,
            command * [2.0, 2.0, 0.25],
            data.qpos[7:] - STANDING,
            0.05 * data.qvel[6:],
            action,
        )
    )
    reward = math.exp(-((command[:2] - velocity[:2]) ** 2).sum() / 0.25)
    reward += 0.5 * math.exp(-((command[2] - data.qvel[5]) ** 2) / 0.25)
    reward -= 2.5e-5 * (data.actuator_force**2).sum()
    touched = [
        data.sensor(name).data[0] for name in ("base_contact", *(f"{leg}_knee_contact" for leg in LEGS))
    ]
    return max(reward, 0.0), max(touched) > 1.0, obs


def test_contact_sensors_detect_the_base_and_each_knee():
    """On its base, only the base's sensor reports contact; on one knee, only that knee's."""
    model = Anymal().load()
    data = mujoco.MjData(model)
    data.qpos[:7] = [0.0, 0.0, 0.09, 1.0, 0.0, 0.0, 0.0]
    data.qpos[7:] = [0.0, 1.6, 0.0] * 4
    mujoco.mj_forward(model, data)
    assert data.sensor("base_contact").data[0] > 1.0
    assert not any(data.sensor(f"{leg}_knee_contact").data[0] for leg in LEGS)
    for i, leg in enumerate(LEGS):
        # A thigh of 0.285 m hangs straight down, its shank level: the knee is the lowest point of the robot.
        mujoco.mj_resetData(model, data)
        data.qpos[:7] = [0.0, 0.0, 0.285 + 0.05, 1.0, 0.0, 0.0, 0.0]
        data.qpos[7:] = np.array([0.0, 1.5, 0.0] * 4)
        data.qpos[7 + 3 * i : 10 + 3 * i] = [0.0, 0.0, -1.5 if leg[1] == "F" else 1.5]
        mujoco.mj_forward(model, data)
        pressed = [other for other in LEGS if data.sensor(f"{other}_knee_contact").data[0] > 1.0]
        assert pressed == [leg]


def test_mass_and_limits_are_the_published_ones():
    model = Anymal().load()
    assert model.body("base").subtreemass[0] == pytest.approx(52.0, abs=0.2)
    assert model.opt.timestep * 2 == pytest.approx(0.02)
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], 85.0)
    np.testing.assert_allclose(model.actuator_biasprm[:, 1:3], [[-85.0, -2.0]] * 12)
    np.testing.assert_allclose(model.actuator_forcerange, [[-80.0, 80.0]] * 12)
    assert model.nmesh == 0


def test_a_model_without_a_sensor_is_refused(tmp_path):
    path = without(tmp_path, Anymal, 'name="LH_knee_contact"')
    with pytest.raises(ModelError, match=r"lacks the sensor LH_knee_contact"):
        Anymal(xml_file=path).load()


def test_actuators_in_another_order_get_their_own_controls(tmp_path, rules):
    path = without(tmp_path, Anymal, '<position name="LF_HAA"')
    text = Path(path).read_text()
    last = '<position name="LF_HAA" joint="LF_HAA"/></actuator>'
    Path(path).write_text(text.replace("</actuator>", last))
    task = Anymal(xml_file=path)
    given = state()
    given.actions[0, :3] = torch.tensor([1.0, 0.5, -1.0])
    usual, _ = rules.control(given)
    moved, _ = task.rules(task.load(), device=rules.device, dtype=rules.dtype).control(given)
    torch.testing.assert_close(moved[0], usual[0].roll(-1))
