"""Ant and Humanoid against a plain MuJoCo loop with observation and reward in numpy, written from the table."""

from __future__ import annotations

import re

import mujoco
import numpy as np
import pytest
import torch

import rayagi.envs as envs
from rayagi.envs.tasks.provider import make_task
from rayagi.envs.tasks.task import MODELS, State

DT = 1 / 60
TARGET = np.array([1000.0, 0.0])


class OneWorld:
    """The task in its simplest form: one MjData and numpy."""

    def __init__(self, task, state, i):
        self.humanoid = "Humanoid" in task
        self.model = make_task(task, {}).load()
        self.data = mujoco.MjData(self.model)
        for name in ("qpos", "qvel", "qacc_warmstart"):
            getattr(self.data, name)[:] = state["worlds"][name][i]
        limits = self.model.jnt_range[1:]
        self.middle, self.half = limits.mean(axis=1), (limits[:, 1] - limits[:, 0]) / 2
        self.strength = self.model.actuator_gear[:, 0] / self.model.actuator_gear[:, 0].max()

    def step(self, action):
        data = self.data
        place = data.qpos[:2].copy()
        data.ctrl[:] = action
        mujoco.mj_step(self.model, data, nstep=2)
        obs = self.observation(action)
        joints = slice(12, 12 + len(action))
        u, speeds = obs[joints], obs[joints.stop : joints.stop + len(action)]
        before, after = np.linalg.norm(TARGET - place), np.linalg.norm(TARGET - data.qpos[:2])
        reward = (before - after) / DT + (2.0 if self.humanoid else 0.5)
        reward += 0.1 if obs[10] > 0.93 else 0.0
        reward += 0.5 if obs[11] > 0.8 else 0.5 * obs[11] / 0.8
        reward -= (0.01 if self.humanoid else 0.005) * np.sum(action**2)
        reward -= 0.05 * np.sum(np.abs(action * speeds) * self.strength)
        if self.humanoid:
            reward -= sum(
                0.25 * strength * (abs(value) - 0.98) / 0.02
                for value, strength in zip(u, self.strength, strict=True)
                if abs(value) > 0.98
            )
        else:
            reward -= 0.1 * np.count_nonzero(u > 0.99)
        fallen = data.qpos[2] < (0.8 if self.humanoid else 0.31)
        return obs, ((-1.0 if self.humanoid else -2.0) if fallen else reward), fallen

    def observation(self, action):
        data, w = self.data, self.data.qpos[3:7]
        frame = np.zeros(9)
        mujoco.mju_quat2Mat(frame, w)
        frame = frame.reshape(3, 3)
        yaw = np.arctan2(2 * (w[0] * w[3] + w[1] * w[2]), 1 - 2 * (w[2] ** 2 + w[3] ** 2))
        roll = np.arctan2(2 * (w[0] * w[1] + w[2] * w[3]), 1 - 2 * (w[1] ** 2 + w[2] ** 2))
        to_target = TARGET - data.qpos[:2]
        heading = frame[:2, 0] @ to_target / np.linalg.norm(to_target)
        direction = np.arctan2(to_target[1], to_target[0])
        turn, speed, force = (0.25, 0.1, 0.01) if self.humanoid else (1.0, 0.2, 0.1)
        torques = [force * (data.qfrc_actuator + data.qfrc_passive)[6:]] if self.humanoid else []
        parts = [
            [data.qpos[2]],
            frame.T @ data.qvel[:3],
            turn * data.qvel[3:6],
            [yaw, roll, direction - yaw, frame[2, 2], heading],
            (data.qpos[7:] - self.middle) / self.half,
            speed * data.qvel[6:],
            *torques,
            force * data.sensordata,
            action,
        ]
        return np.concatenate(parts)


@pytest.mark.parametrize("task", ["rayagi/Ant-v0", "rayagi/Humanoid-v0"])
@pytest.mark.parametrize("warm_up", [0, 3, 25])
def test_twenty_steps_from_random_states_are_those_of_a_plain_loop(task, warm_up):
    rng = np.random.default_rng(warm_up)
    env = envs.make_env_factory(task)(num_envs=4, first_env_index=0, seed=warm_up, num_threads=2)
    size = env.info.action.dim
    env.reset()
    for _ in range(warm_up):
        env.step(torch.from_numpy(rng.uniform(-1, 1, (4, size))))
    worlds = [OneWorld(task, env.state_dict(), i) for i in range(4)]
    running = set(range(4))
    compared = 0
    for _ in range(20):
        actions = rng.uniform(-1, 1, (4, size))
        got = env.step(torch.from_numpy(actions))
        for i in sorted(running):
            obs, reward, fallen = worlds[i].step(actions[i])
            ended = i in got.final_ids.tolist()
            got_obs = got.final_obs[got.final_ids.tolist().index(i)] if ended else got.obs[i]
            np.testing.assert_allclose(got_obs.numpy(), obs, rtol=2e-6, atol=2e-6)
            np.testing.assert_allclose(float(got.rewards[i]), reward, rtol=2e-6, atol=2e-6)
            assert bool(got.terminated[i]) == fallen == ended
            compared += 1
            running -= {i} if ended else set()
    assert compared >= 40


def rules_of(task, dtype=torch.float64):
    made = make_task(task, {})
    return made.rules(made.load(), device=torch.device("cpu"), dtype=dtype)


def state_of(rules, *, place, height, quat, joints, before, action):
    """One world, its joints at these shares of their ranges and at rest."""
    qpos = torch.zeros((1, rules.model.nq), dtype=rules.dtype)
    qpos[0, :2], qpos[0, 2] = torch.tensor(place, dtype=rules.dtype), height
    qpos[0, 3:7] = torch.tensor(quat, dtype=rules.dtype)
    qpos[0, 7:] = rules.middle + joints * rules.half
    before = torch.tensor([before], dtype=rules.dtype)
    memory = {"place": before, "distance": torch.linalg.vector_norm(rules.target - before, dim=-1)}
    fields = {
        "qpos": qpos,
        "qvel": torch.zeros((1, rules.model.nv), dtype=rules.dtype),
        "sensordata": torch.zeros((1, rules.model.nsensordata), dtype=rules.dtype),
        "qfrc_actuator": torch.ones((1, rules.model.nv), dtype=rules.dtype),
        "qfrc_passive": torch.ones((1, rules.model.nv), dtype=rules.dtype),
    }
    actions = torch.full((1, len(rules.task.joints)), action, dtype=rules.dtype)
    return State(fields, memory, actions, qpos.new_empty((1, 0)))


UPRIGHT, LEFT = (1.0, 0.0, 0.0, 0.0), (0.5**0.5, 0.0, 0.0, 0.5**0.5)


@pytest.mark.parametrize(
    ("task", "want"),
    [
        # 0.05 m in 1/60 s is 3 m/s; alive 0.5, upright 0.1, ahead 0.5; 8 x 0.5^2 x 0.005 = 0.01 of effort.
        ("rayagi/Ant-v0", 3 + 0.5 + 0.1 + 0.5 - 0.01),
        # Alive 2; 21 x 0.5^2 x 0.01 = 0.0525.
        ("rayagi/Humanoid-v0", 3 + 2 + 0.1 + 0.5 - 0.0525),
    ],
)
def test_the_reward_of_running_three_metres_per_second(task, want):
    rules = rules_of(task)
    state = state_of(
        rules, place=(0.05, 0.0), height=1.2, quat=UPRIGHT, joints=0.0, before=(0.0, 0.0), action=0.5
    )
    outcome = rules.reward_and_done(state)
    assert float(outcome.rewards) == pytest.approx(want, abs=1e-9)
    assert not outcome.terminated


@pytest.mark.parametrize(
    ("task", "height", "want"), [("rayagi/Ant-v0", 0.3, -2), ("rayagi/Humanoid-v0", 0.79, -1)]
)
def test_a_fall_costs_and_ends(task, height, want):
    rules = rules_of(task)
    state = state_of(
        rules, place=(0.5, 0.0), height=height, quat=UPRIGHT, joints=0.0, before=(0.0, 0.0), action=0.0
    )
    outcome = rules.reward_and_done(state)
    assert (float(outcome.rewards), bool(outcome.terminated)) == (want, True)


def test_joints_at_their_limits_cost():
    ant, humanoid = rules_of("rayagi/Ant-v0"), rules_of("rayagi/Humanoid-v0")
    joints = torch.full((1, 8), 0.5)
    joints[0, :3] = torch.tensor([0.995, 1.0, -1.0])  # the lower limit is free
    assert float(ant.limit_cost(joints)) == pytest.approx(0.2)
    joints = torch.zeros((1, 21), dtype=torch.float64)
    hip, elbow = rules_index(humanoid, "right_hip_y"), rules_index(humanoid, "left_elbow")
    joints[0, hip], joints[0, elbow] = (
        -1.0,
        0.99,
    )  # 135 N m of 135: 0.25; 45 N m of 135, half way: 0.25 / 3 / 2
    assert float(humanoid.limit_cost(joints)) == pytest.approx(0.25 + 0.25 / 6)


def rules_index(rules, joint):
    return rules.task.joints.index(joint)


def test_a_robot_facing_left_has_its_target_to_the_right():
    rules = rules_of("rayagi/Ant-v0")
    state = state_of(
        rules, place=(0.0, 0.0), height=0.5, quat=LEFT, joints=0.0, before=(0.0, 0.0), action=0.0
    )
    state.fields["qvel"][0, :3] = torch.tensor([2.0, 0.0, 0.0])
    obs = rules.observe(state)[0]
    # It moves along the world's x, which is to its right: its own -y.
    np.testing.assert_allclose(obs[1:4].numpy(), [0.0, -2.0, 0.0], atol=1e-12)
    yaw, roll, to_target, up, heading = obs[7:12].tolist()
    assert (yaw, roll, to_target) == pytest.approx((np.pi / 2, 0.0, -np.pi / 2))
    assert (up, heading) == pytest.approx((1.0, 0.0), abs=1e-12)


def test_progress_keeps_its_digits_in_single_precision():
    """Near 1000 m, neighbouring float32 distances are 6e-5 m, 0.004 m/s of one step, apart."""
    single, double = rules_of("rayagi/Ant-v0", torch.float32), rules_of("rayagi/Ant-v0")
    given = {"place": (0.3217, 0.2), "height": 0.5, "quat": UPRIGHT, "joints": 0.0, "action": 0.0}
    rewards = [
        float(rules.reward_and_done(state_of(rules, before=(0.31, 0.15), **given)).rewards)
        for rules in (single, double)
    ]
    assert rewards[0] == pytest.approx(rewards[1], abs=2e-5)


def test_humanoids_joint_torques_are_what_motors_springs_and_dampers_do():
    rules = rules_of("rayagi/Humanoid-v0")
    state = state_of(
        rules, place=(0.0, 0.0), height=1.3, quat=UPRIGHT, joints=0.0, before=(0.0, 0.0), action=0.0
    )
    assert rules.observe(state)[0, 54:75].tolist() == pytest.approx([0.02] * 21)


def test_a_users_model_may_have_its_parts_in_another_order_and_more_of_them(tmp_path):
    """Motors and sensors reversed, and a tail with a motor: the robot steps as ours does."""
    text = (MODELS / "ant.xml").read_text()
    for section in ("actuator", "sensor"):
        body = re.search(rf"<{section}>\n(.*?)\n  </{section}>", text, re.DOTALL).group(1)
        text = text.replace(body, "\n".join(reversed(body.splitlines())))
    tail = '<body name="tail" pos="0 0 0.3"><joint name="tail" type="slide"/><geom size="0.01" mass="1e-9"/></body>'
    text = text.replace("</worldbody>", tail + "</worldbody>")
    text = text.replace("<actuator>", '<actuator><motor name="tail" joint="tail" gear="1e-9"/>')
    (tmp_path / "mine.xml").write_text(text)
    place = {"num_envs": 2, "first_env_index": 0, "seed": 1, "num_threads": 1}
    ours = envs.make_env_factory("rayagi/Ant-v0")(**place)
    users = envs.make_env_factory("rayagi/Ant-v0", kwargs={"xml_file": str(tmp_path / "mine.xml")})(**place)
    np.testing.assert_allclose(users.reset(), ours.reset(), atol=1e-6)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        actions = 2 * torch.rand((2, 8), generator=generator) - 1
        want, got = ours.step(actions), users.step(actions)
        np.testing.assert_allclose(got.obs, want.obs, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got.rewards, want.rewards, rtol=1e-4, atol=1e-4)


def test_a_users_model_whose_torso_is_fixed_is_refused(tmp_path):
    text = (
        (MODELS / "ant.xml")
        .read_text()
        .replace('<freejoint name="root"/>', '<joint name="root" type="slide"/>')
    )
    (tmp_path / "fixed.xml").write_text(text)
    with pytest.raises(envs.errors.ModelError, match=r"fixed\.xml: its joint root must be a free joint"):
        envs.make_env_factory("rayagi/Ant-v0", kwargs={"xml_file": str(tmp_path / "fixed.xml")})(
            num_envs=1, first_env_index=0, seed=0, num_threads=1
        )
