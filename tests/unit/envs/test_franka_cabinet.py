"""FrankaCabinet: hand-computed observations and rewards, and a comparison with a plain MuJoCo loop."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch
from task_worlds import TaskWorlds, bound, sensor_row

from rayagi.envs import make_env_factory
from rayagi.envs.errors import ModelError
from rayagi.envs.tasks.franka_cabinet import FrankaCabinet
from rayagi.envs.tasks.task import State

LOW = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973, 0.0, 0.0])
HIGH = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973, 0.04, 0.04])
USUAL = np.array([1.157, -1.066, -0.155, -2.239, -1.841, 1.003, 0.469, 0.035, 0.035])
ALIGNED = {
    "grasp_forward": [-1.0, 0.0, 0.0],
    "grasp_up": [0.0, 0.0, 1.0],
    "handle_outward": [1.0, 0.0, 0.0],
    "handle_up": [0.0, 0.0, 1.0],
    "handle": [0.5, 0.0, 0.7],
}


def state_with(rules, *, opening=0.0, actions=0.0, **sensors) -> State:
    """One world with the drawer open so far and these values of sensors."""
    model = rules.model
    qpos = torch.from_numpy(model.qpos0.copy()).unsqueeze(0)
    qpos[0, int(model.joint("drawer").qposadr[0])] = opening
    fields = {
        "qpos": qpos,
        "qvel": torch.zeros((1, model.nv), dtype=torch.float64),
        "sensordata": sensor_row(model, **(ALIGNED | sensors)).unsqueeze(0),
    }
    return State(fields, {}, torch.full((1, 9), actions, dtype=torch.float64), torch.zeros((1, 0)))


@pytest.fixture(scope="module")
def rules():
    return bound(FrankaCabinet())


def test_a_straddling_grasp_of_a_drawer_half_open_earns_every_term(rules):
    state = state_with(
        rules, opening=0.25, grasp=[0.5, 0.0, 0.7], left_finger=[0.5, 0.0, 0.71], right_finger=[0.5, 0, 0.69]
    )
    outcome = rules.reward_and_done(state)
    # 2 x 2 near, 0.25 x 2 aligned, 0.125 straddling, 5 x 0.06 fingers, 7.5 x 0.25 x 1.5 open, 0.5 + 0.5 bonuses
    assert outcome.rewards.item() == pytest.approx(4.0 + 0.5 + 0.125 + 0.3 + 2.8125 + 1.0)
    assert not outcome.terminated.item()


def test_a_metre_away_with_both_fingers_above_the_handle(rules):
    high = {"left_finger": [1.5, 0.0, 0.8], "right_finger": [1.5, 0.0, 0.72], "grasp": [1.5, 0.0, 0.7]}
    outcome = rules.reward_and_done(state_with(rules, actions=1.0, **high))
    assert outcome.rewards.item() == pytest.approx(2.0 / 4.0 + 0.5 - 0.09)
    # Pointing out of the drawer at 60 degrees, and its up axis level: -0.25 x 0.25.
    turned = {"grasp_forward": [0.5, 0.75**0.5, 0.0], "grasp_up": [0.0, 1.0, 0.0]}
    outcome = rules.reward_and_done(state_with(rules, opening=0.02, **high, **turned))
    assert outcome.rewards.item() == pytest.approx(0.5 - 0.0625 + 7.5 * 0.02 + 0.5)


def test_an_open_drawer_ends_the_episode_with_the_last_bonus(rules):
    fingers = {"left_finger": [0.5, 0.0, 0.74], "right_finger": [0.5, 0.0, 0.66]}
    outcome = rules.reward_and_done(state_with(rules, opening=0.395, grasp=[0.5, 0.3, 0.7], **fingers))
    near = 2.0 / 1.09**2
    want = near + 0.5 + 0.125 + 7.5 * 0.395 * 1.5 + 0.5 + 0.5 + 1.0
    assert outcome.rewards.item() == pytest.approx(want)
    assert outcome.terminated.item()


@pytest.mark.parametrize("finger", ["left_finger", "right_finger"])
def test_a_finger_past_the_handle_costs_one_instead_of_all(rules, finger):
    fingers = {"left_finger": [0.5, 0.0, 0.71], "right_finger": [0.5, 0.0, 0.69]}
    fingers[finger][0] = 0.459
    outcome = rules.reward_and_done(state_with(rules, opening=0.3, grasp=[0.5, 0.0, 0.7], **fingers))
    assert outcome.rewards.item() == -1.0


def test_observation_by_hand(rules):
    state = state_with(rules, opening=0.1, grasp=[0.8, 0.1, 0.9])
    qpos, qvel = state.fields["qpos"], state.fields["qvel"]
    joints = [int(rules.model.joint(f"joint{k}").qposadr[0]) for k in range(1, 8)]
    fingers = [int(rules.model.joint(f"finger{k}").qposadr[0]) for k in (1, 2)]
    qpos[0, joints + fingers] = torch.from_numpy(np.r_[HIGH[:3], LOW[3:6], (LOW + HIGH)[6:] / 2])
    qvel[0, joints[0]], qvel[0, fingers[1]] = 2.0, -0.5
    qvel[0, int(rules.model.joint("drawer").dofadr[0])] = 0.25
    want = np.zeros(23)
    want[:6] = [1, 1, 1, -1, -1, -1]
    want[9], want[17] = 0.2, -0.05
    want[18:] = [0.5 - 0.8, -0.1, 0.7 - 0.9, 0.1, 0.25]
    np.testing.assert_allclose(rules.observe(state)[0].numpy(), want, atol=1e-12)


def test_a_full_action_moves_the_targets_by_an_eighth_and_stays_within_limits(rules):
    targets = torch.from_numpy(np.stack((USUAL, HIGH - 1e-4)))
    fields = {"qpos": torch.zeros((2, rules.model.nq)), "qvel": torch.zeros((2, rules.model.nv))}
    state = State(fields, {"targets": targets}, torch.ones((2, 9), dtype=torch.float64), torch.zeros((2, 0)))
    controls, memory = rules.control(state)
    moved = np.minimum(USUAL + np.r_[np.full(7, 0.125), 0.0125, 0.0125], HIGH)
    np.testing.assert_allclose(controls.numpy(), np.stack((moved, HIGH)), atol=1e-12)
    np.testing.assert_array_equal(memory["targets"], controls)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_episodes_start_near_the_usual_posture_with_the_drawer_shut(rules, share):
    start = rules.start(torch.full((2, 9), share, dtype=torch.float64))
    want = np.clip(USUAL + 0.125 * (2 * share - 1), LOW, HIGH)
    np.testing.assert_allclose(start.memory["targets"][0], want, atol=1e-12)
    np.testing.assert_allclose(start.qpos[1, rules.positions], want, atol=1e-12)
    assert start.qpos[:, rules.drawer].abs().max() == 0.0
    assert start.qvel.abs().max() == 0.0


class Reference:
    """One world stepped with MuJoCo and numpy alone, from the definition in the module's docstring."""

    def __init__(self, model, data, targets) -> None:
        self.model, self.data, self.targets = model, data, targets

    def step(self, action):
        m, d = self.model, self.data
        speed = 7.5 * np.r_[np.ones(7), 0.1, 0.1]
        self.targets = np.clip(self.targets + speed * action / 60, LOW, HIGH)
        for name, target in zip(self.names(), self.targets, strict=True):
            d.actuator(name).ctrl = target
        for _ in range(2):
            mujoco.mj_step(m, d)
        return self.observation(), *self.reward(action)

    def names(self):
        return [f"joint{k}" for k in range(1, 8)] + ["finger1", "finger2"]

    def observation(self):
        d = self.data
        q = np.array([d.joint(name).qpos[0] for name in self.names()])
        qd = np.array([d.joint(name).qvel[0] for name in self.names()])
        drawer = d.joint("drawer")
        to_handle = d.site("handle").xpos - d.site("grasp").xpos
        scaled = 2 * (q - LOW) / (HIGH - LOW) - 1
        return np.concatenate((scaled, 0.1 * qd, to_handle, drawer.qpos, drawer.qvel))

    def reward(self, action):
        d = self.data
        handle, grasp = d.site("handle"), d.site("grasp")
        hand, front = grasp.xmat.reshape(3, 3), handle.xmat.reshape(3, 3)
        opening = d.joint("drawer").qpos[0]
        distance = np.linalg.norm(grasp.xpos - handle.xpos)
        reward = 2 / (1 + distance**2) ** 2 * (2 if distance <= 0.02 else 1)
        for dot in (hand[:, 2] @ -front[:, 0], hand[:, 1] @ front[:, 2]):
            reward += 0.25 * np.sign(dot) * dot**2
        left, right = (d.site(f"{side}_finger").xpos - handle.xpos for side in ("left", "right"))
        around = 0.5 if left[2] > 0 > right[2] else 0.0
        reward += 0.25 * around + 7.5 * opening * (1 + around) - 0.01 * (action**2).sum()
        if around:
            reward += 5 * ((0.04 - abs(left[2])) + (0.04 - abs(right[2])))
        reward += 0.5 * (opening > 0.01) + around * (opening > 0.2) + 2 * around * (opening > 0.39)
        if left[0] < -0.04 or right[0] < -0.04:
            reward = -1.0
        return reward, opening > 0.39


def test_twenty_steps_equal_a_loop_over_single_worlds():
    worlds = TaskWorlds(FrankaCabinet(), 3, seed=5)
    for _ in range(25):
        worlds.step(worlds.random_actions())
    model = worlds.rules.model
    references = [Reference(model, worlds.data(i), worlds.memory["targets"][i].numpy()) for i in range(3)]
    for _ in range(20):
        actions = worlds.random_actions()
        obs, rewards, terminated = worlds.step(actions)
        for i, reference in enumerate(references):
            want_obs, want_reward, want_end = reference.step(actions[i].numpy())
            np.testing.assert_allclose(obs[i].numpy(), want_obs, rtol=1e-9, atol=1e-9)
            assert rewards[i].item() == pytest.approx(want_reward, rel=1e-9, abs=1e-9)
            assert bool(terminated[i]) == want_end


@pytest.mark.parametrize("seed", [0, 1])
def test_the_arm_can_grasp_the_handle_and_pull_the_drawer_open(seed):
    """By damped least squares on the hand's pose: before the handle, around it, close, then back with it."""
    worlds = TaskWorlds(FrankaCabinet(), 1, seed)
    model = worlds.rules.model
    site, grasped_at, opening = model.site("grasp").id, None, 0.0
    dofs = [int(model.joint(f"joint{k}").dofadr[0]) for k in range(1, 8)]
    for step in range(400):
        data = worlds.data(0)
        mujoco.mj_fwdPosition(model, data)
        hand, opening = data.site_xmat[site].reshape(3, 3), float(data.joint("drawer").qpos[0])
        held = grasped_at is not None and step > grasped_at + 20
        ahead = 0.05 if held else max(0.12 - 0.002 * step, 0.0)
        away = data.site("handle").xpos + np.array([ahead, 0.0, 0.0]) - data.site_xpos[site]
        turn = np.cross(hand[:, 2], [-1, 0, 0]) + np.cross(hand[:, 1], [0, 0, 1])
        jacobian = np.zeros((6, model.nv))
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], site)
        arm = jacobian[:, dofs]
        half = 0.5 * arm.T @ np.linalg.solve(arm @ arm.T + 1e-3 * np.eye(6), np.r_[away, 0.5 * turn])
        if grasped_at is None and step > 70 and np.linalg.norm(away) < 0.02:
            grasped_at = step
        fingers = [1.0, 1.0] if grasped_at is None else [-1.0, -1.0]
        action = np.clip(np.r_[half, fingers], -1.0, 1.0)
        if worlds.step(torch.from_numpy(action).unsqueeze(0))[2].item():
            return
    pytest.fail(f"the drawer came out by {opening:.3f} m")


def test_seeds_reproduce_and_environments_differ():
    make = make_env_factory("rayagi/FrankaCabinet-v0")
    alike = [make(num_envs=3, first_env_index=0, seed=4, num_threads=threads) for threads in (1, 2)]
    alone = make(num_envs=1, first_env_index=2, seed=4, num_threads=1)
    other = make(num_envs=3, first_env_index=0, seed=5, num_threads=1)
    one, two = (env.reset() for env in alike)
    assert torch.equal(one, two)
    assert torch.equal(alone.reset()[0], one[2])
    assert not torch.equal(other.reset(), one)
    assert not torch.equal(one[0], one[1])
    actions = torch.full((3, 9), 0.3)
    steps = [env.step(actions) for env in alike]
    assert torch.equal(steps[0].obs, steps[1].obs)
    assert torch.equal(alone.step(actions[:1]).obs[0], steps[0].obs[2])


@pytest.mark.parametrize(
    ("part", "name"),
    [("sensor", "handle_up"), ("joint", "drawer"), ("actuator", "finger2")],
)
def test_a_users_model_without_a_part_is_rejected_by_name(tmp_path, part, name):
    text = FrankaCabinet().path.read_text().splitlines()
    tags = {"sensor": "<frame", "joint": "<joint", "actuator": "<position"}
    lines = [line for line in text if not (tags[part] in line and f'name="{name}"' in line)]
    assert len(lines) == len(text) - 1
    file = tmp_path / "mine.xml"
    file.write_text("\n".join(lines))
    with pytest.raises(ModelError, match=f"mine.xml: it lacks the {part} {name}"):
        FrankaCabinet(xml_file=str(file)).load()
