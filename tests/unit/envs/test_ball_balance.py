"""BallBalance: observations, rewards and terminations of hand-computed states, and a comparison with a plain MuJoCo loop."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from single_world import copy_of, make_envs, random_actions, reward_of, without

from rayagi.envs.errors import ModelError
from rayagi.envs.tasks.ball_balance import BallBalance, BallBalanceRules
from rayagi.envs.tasks.task import State

TASK = "rayagi/BallBalance-v0"
LOADS = ("load_force", "load_torque_0", "load_torque_1", "load_torque_2")


@pytest.fixture(scope="module")
def rules() -> BallBalanceRules:
    task = BallBalance()
    return task.rules(task.load(), device=torch.device("cpu"), dtype=torch.float64)


def state(rules: BallBalanceRules, *, ball: tuple[float, ...], velocity: tuple[float, ...]) -> State:
    """qpos: tray 7, then hip and knee of each leg, then the ball 7; qvel in the same order."""
    qpos, qvel = rules.qpos0.repeat(1, 1), torch.zeros((1, 18), dtype=torch.float64)
    qpos[0, 13:16], qvel[0, 12:15] = torch.tensor(ball), torch.tensor(velocity)
    fields = {"qpos": qpos, "qvel": qvel, "sensordata": torch.zeros((1, 12), dtype=torch.float64)}
    memory = {"targets": torch.zeros((1, 3), dtype=torch.float64)}
    return State(fields, memory, torch.zeros((1, 3), dtype=torch.float64), torch.zeros((1, 0)))


def test_observation_by_hand(rules):
    given = state(rules, ball=(0.1, -0.2, 0.8), velocity=(1.0, 2.0, -3.0))
    # Hips at 9, knees at 0.1, 0.2, 0.3 rad and 1, 2, 3 rad/s.
    given.fields["qpos"][0, 7:13] = torch.tensor([9.0, 0.1, 9.0, 0.2, 9.0, 0.3])
    given.fields["qvel"][0, 6:12] = torch.tensor([9.0, 1.0, 9.0, 2.0, 9.0, 3.0])
    given.fields["sensordata"][0] = 20.0 * torch.arange(12)
    want = [0.1, 0.2, 0.3, 1.0, 2.0, 3.0, 0.1, -0.2, 0.8, 1.0, 2.0, -3.0, *range(12)]
    torch.testing.assert_close(rules.observe(given).float(), torch.tensor([want]))


def test_reward_by_hand(rules):
    # 0.5 m from (0, 0, 0.7) at 1 m/s: 1 / 1.5 x 1 / 2.
    given = state(rules, ball=(0.3, 0.0, 0.3), velocity=(0.0, 0.6, -0.8))
    assert float(rules.reward_and_done(given).rewards) == pytest.approx(1.0 / 3.0, abs=1e-7)
    there = state(rules, ball=(0.0, 0.0, 0.7), velocity=(0.0, 0.0, 0.0))
    assert float(rules.reward_and_done(there).rewards) == pytest.approx(1.0, abs=1e-7)


@pytest.mark.parametrize(("height", "ended"), [(0.149, True), (0.151, False)])
def test_ends_when_the_ball_is_down(rules, height, ended):
    given = state(rules, ball=(0.0, 0.9, height), velocity=(0.0, 0.0, 0.0))
    assert bool(rules.reward_and_done(given).terminated) is ended


def test_actions_move_the_targets_within_the_joints_limits(rules):
    given = state(rules, ball=(0.0, 0.0, 1.0), velocity=(0.0, 0.0, 0.0))
    given.memory["targets"][0] = torch.tensor([0.1, 1.5, -1.2])
    given.actions[0] = torch.tensor([-0.5, 1.0, -1.0])
    # 20 rad/s for 0.01 s is 0.2 rad; 90 degrees and -70 degrees are the ends.
    want = torch.tensor([[0.0, math.pi / 2, -math.radians(70)]], dtype=torch.float64)
    targets, changed = rules.control(given)
    torch.testing.assert_close(targets, want)
    torch.testing.assert_close(changed["targets"], want)


def test_range_of_starts(rules):
    # In the order distance, angle, speed, height.
    draws = torch.tensor(
        [[0.0, 0.0, 1.0, 0.0], [1.0, 0.25, 0.0, 0.5], [1.0, 0.5, 1.0, 1.0], [0.5, 0.0, 0.5, 0.0]]
    )
    start = rules.start(draws.double())
    want_place = [[0.001, 0.0, 1.0], [0.0, 0.5, 1.5], [-0.5, 0.0, 2.0], [0.2505, 0.0, 1.0]]
    want_velocity = [[0.0, 0.0, -5.0], [0.0, 0.0, -5.0], [5.0, 0.0, -5.0], [-1.25, 0.0, -5.0]]
    torch.testing.assert_close(start.qpos[:, 13:16].float(), torch.tensor(want_place))
    torch.testing.assert_close(start.qvel[:, 12:15].float(), torch.tensor(want_velocity))
    torch.testing.assert_close(start.qpos[:, :13], rules.qpos0[:13].repeat(4, 1))
    assert not start.memory["targets"].any()


def test_targets_are_reset_with_an_episode():
    env = make_envs(TASK, 1, max_episode_steps=5)
    env.reset()
    for _ in range(5):
        step = env.step(torch.ones(1, 3))
    assert step.truncated.all()
    assert not env.state_dict()["memory"]["targets"].any()


def test_sensors_measure_the_balls_weight_and_position():
    """At rest the frame holds up plate and ball; a torque around a hip is that of the two weights' distances from it."""
    model = BallBalance().load()
    data = mujoco.MjData(model)
    data.qpos[13:16] = [0.1, -0.05, 0.5691 + 0.1]
    mujoco.mj_step(model, data, nstep=400)
    plate, ball = 1.47 * 9.81, float(model.body("ball").mass[0]) * 9.81
    np.testing.assert_allclose(data.sensor("load_force").data, [0.0, 0.0, plate + ball], atol=0.05)
    place = data.qpos[13:15]
    for i, angle in enumerate((0.0, 2 * math.pi / 3, 4 * math.pi / 3)):
        hip = 0.4 * np.array([math.cos(angle), math.sin(angle)])
        # (x, y, 0) x (0, 0, w) = (y w, -x w, 0), for the plate's middle and the ball, relative to the hip.
        x, y = plate * -hip + ball * (place - hip)
        np.testing.assert_allclose(data.sensor(f"load_torque_{i}").data, [y, -x, 0.0], atol=0.05)


def test_mechanism_has_three_degrees_of_freedom():
    """Pinned feet: each leg's height is a matter of its knee alone, and the pins hold under the wildest actions."""
    env = make_envs(TASK, 4)
    env.reset()
    model = BallBalance().load()
    data = mujoco.MjData(model)
    for step in range(60):
        env.step(random_actions(4, 3, step))
        for i in range(4):
            data.qpos[:] = env.fields["qpos"][i].numpy()
            mujoco.mj_kinematics(model, data)
            for leg in range(3):
                off = data.site(f"foot_{leg}").xpos - data.site(f"pin_{leg}").xpos
                assert np.linalg.norm(off) < 0.03


def test_a_still_tray_holds_a_ball_dropped_on_its_middle_and_loses_one_that_is_pushed():
    env = make_envs(TASK, 2)
    env.reset()
    begun = env.state_dict()
    qpos, qvel = begun["worlds"]["qpos"], begun["worlds"]["qvel"]
    qpos[:, 13:16], qvel[:, 12:15] = [0.0, 0.0, 1.0], [[0.0, 0.0, -5.0], [2.0, 0.0, -5.0]]
    env.load_state_dict(begun)
    for _ in range(200):
        step = env.step(torch.zeros(2, 3))
        if len(step.final_ids):
            break
    assert step.final_ids.tolist() == [1]
    assert step.obs[0, 8] == pytest.approx(0.669, abs=0.01)


def test_trajectory_equals_that_of_a_single_world(rules):
    """Observations, rewards and terminations over 20 steps from random states, against a plain MuJoCo loop and numpy."""
    env = make_envs(TASK, 6)
    env.reset()
    for step in range(25):
        env.step(random_actions(6, 3, step))
    worlds = [copy_of(rules.model, env, i) for i in range(6)]
    targets = env.state_dict()["memory"]["targets"].numpy()
    low, high = math.radians(-70), math.radians(90)
    touched = False
    for step in range(20):
        actions = random_actions(6, 3, 100 + step)
        got = env.step(actions)
        assert not len(got.final_ids)
        obs, rewards = env.state_dict()["obs"], reward_of(rules, env)
        targets = np.clip(targets + 0.2 * np.clip(actions.double().numpy(), -1, 1), low, high)
        for i, data in enumerate(worlds):
            data.ctrl[:] = targets[i]
            mujoco.mj_step(rules.model, data, nstep=2)
            touched |= data.ncon > 0
            np.testing.assert_allclose(env.fields["qpos"][i].numpy(), data.qpos, atol=1e-9)
            np.testing.assert_allclose(env.fields["qvel"][i].numpy(), data.qvel, atol=1e-9)
            knees = [data.joint(f"knee_{leg}") for leg in range(3)]
            ball, velocity = data.joint("ball").qpos[:3], data.joint("ball").qvel[:3]
            loads = [data.sensor(name).data / 20 for name in LOADS]
            parts = (
                [knee.qpos[0] for knee in knees],
                [knee.qvel[0] for knee in knees],
                ball,
                velocity,
                *loads,
            )
            np.testing.assert_allclose(obs[i].numpy(), np.concatenate(parts), atol=1e-9)
            reward = 1 / (1 + np.linalg.norm(ball - [0, 0, 0.7])) / (1 + np.linalg.norm(velocity))
            assert float(rewards[i]) == pytest.approx(reward, abs=1e-9)
            assert float(got.rewards[i]) == pytest.approx(reward, abs=1e-6)
    assert touched


def test_a_model_without_a_sensor_is_refused(tmp_path):
    path = without(tmp_path, BallBalance, 'name="load_torque_2"')
    with pytest.raises(ModelError, match="lacks the sensor load_torque_2"):
        BallBalance(xml_file=path).load()


def test_a_model_without_an_actuator_is_refused(tmp_path):
    path = without(tmp_path, BallBalance, '<position name="knee_1"')
    with pytest.raises(ModelError, match="lacks the actuator knee_1"):
        BallBalance(xml_file=path).load()
