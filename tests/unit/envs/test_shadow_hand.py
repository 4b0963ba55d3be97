"""ShadowHand: hand-computed observations and rewards, and a comparison with a plain MuJoCo loop."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from task_worlds import TaskWorlds, bound

from rayagi.envs import make_env_factory
from rayagi.envs.errors import ModelError
from rayagi.envs.tasks.shadow_hand import ShadowHand
from rayagi.envs.tasks.task import MODELS, State

FINGERS = ("FF", "MF", "RF", "LF", "TH")
JOINTS = ["WRJ2", "WRJ1"]
JOINTS += [f"{finger}J{k}" for finger in FINGERS for k in range(5 if finger in ("LF", "TH") else 4, 0, -1)]
DRIVEN = [name for name in JOINTS if not name.endswith("J1") or name in ("WRJ1", "THJ1")]
COUPLED = [name for name in JOINTS if name not in DRIVEN]
PLACE = np.array([0.0, -0.33, 0.602])
"""The cube's target position: 0.04 m below its start."""
IDENTITY = [1.0, 0.0, 0.0, 0.0]
HALF = math.sqrt(0.5)


@pytest.fixture(scope="module")
def rules():
    return bound(ShadowHand())


def state_with(
    rules, *, place=PLACE, turn=IDENTITY, goal=IDENTITY, actions=0.0, draws=(0.5, 0.5), tolerance=0.1
) -> State:
    """One world whose cube is there."""
    model = rules.model
    qpos = torch.from_numpy(model.qpos0.copy()).unsqueeze(0)
    qpos[0, 24:] = torch.from_numpy(np.r_[place, turn])
    fields = {"qpos": qpos, "qvel": torch.zeros((1, 30), dtype=torch.float64)}
    fields |= {
        name: torch.zeros((1, 30), dtype=torch.float64) for name in ("qfrc_actuator", "qfrc_constraint")
    }
    fields["sensordata"] = torch.zeros((1, model.nsensordata), dtype=torch.float64)
    memory = {"goal": torch.tensor([goal], dtype=torch.float64)}
    memory["tolerance"] = torch.tensor([tolerance], dtype=torch.float64)
    action = torch.full((1, 20), actions, dtype=torch.float64)
    return State(fields, memory, action, torch.tensor([draws], dtype=torch.float64))


def test_the_hand_has_24_joints_20_drives_and_its_published_ranges(rules):
    model = rules.model
    assert [model.joint(k).name for k in range(24)] == JOINTS
    assert (len(JOINTS), len(DRIVEN), len(COUPLED), model.nu) == (24, 20, 4, 20)
    degrees = {
        "FFJ4": (-20, 20),
        "RFJ2": (0, 90),
        "LFJ5": (0, 45),
        "WRJ2": (-28, 8),
        "WRJ1": (-40, 28),
        "THJ5": (-60, 60),
        "THJ4": (0, 70),
        "THJ3": (-12, 12),
        "THJ1": (-15, 90),
    }
    for name, limits in degrees.items():
        np.testing.assert_allclose(np.degrees(model.joint(name).range), limits, atol=0.1)


def test_a_quarter_turn_off_and_a_decimetre_away(rules):
    state = state_with(rules, place=PLACE + np.array([0.1, 0, 0]), turn=[HALF, 0, HALF, 0], actions=0.5)
    outcome = rules.reward_and_done(state)
    assert outcome.rewards.item() == pytest.approx(1 / (math.pi / 2 + 0.1) - 1.0 - 0.0002 * 5.0)
    assert not outcome.terminated.item()
    assert torch.equal(outcome.memory["goal"], state.memory["goal"])


def test_a_reached_goal_pays_and_another_is_drawn(rules):
    # 0.09 rad off; the draws mean: no turn around y, then a quarter turn around x.
    turn = [math.cos(0.045), 0.0, 0.0, math.sin(0.045)]
    outcome = rules.reward_and_done(state_with(rules, turn=turn, draws=(0.75, 0.5)))
    assert outcome.rewards.item() == pytest.approx(250.0 + 1 / 0.19)
    np.testing.assert_allclose(outcome.memory["goal"][0], [HALF, HALF, 0.0, 0.0], atol=1e-12)
    beside = [math.cos(0.055), 0.0, 0.0, math.sin(0.055)]
    assert rules.reward_and_done(state_with(rules, turn=beside)).rewards.item() == pytest.approx(1 / 0.21)


@pytest.mark.parametrize(
    ("angle", "tolerance", "pays", "following"),
    [
        (0.39, 0.4, True, 0.32),  # 0.8 of 0.4
        (0.41, 0.4, False, 0.4),
        (0.11, 0.12, True, 0.1),  # 0.096 is below the smallest tolerance
        (0.11, 0.1, False, 0.1),
    ],
)
def test_each_goal_reduces_the_tolerance_of_the_next(rules, angle, tolerance, pays, following):
    turn = [math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2)]
    outcome = rules.reward_and_done(state_with(rules, turn=turn, tolerance=tolerance))
    assert outcome.rewards.item() == pytest.approx(250.0 * pays + 1 / (angle + 0.1))
    assert outcome.memory["tolerance"].item() == pytest.approx(following)


def test_an_episode_begins_with_the_first_tolerance():
    draws = torch.zeros((2, 31), dtype=torch.float64)
    assert bound(ShadowHand()).start(draws).memory["tolerance"].tolist() == [0.4, 0.4]
    fixed = ShadowHand(first_tolerance=0.2, last_tolerance=0.2)
    assert bound(fixed).start(draws).memory["tolerance"].tolist() == [0.2, 0.2]


def test_the_sign_of_a_quaternion_does_not_matter(rules):
    outcome = rules.reward_and_done(state_with(rules, turn=[-1.0, 0.0, 0.0, 0.0]))
    assert outcome.rewards.item() == pytest.approx(250.0 + 10.0)


@pytest.mark.parametrize(("below", "ends"), [(0.239, False), (0.241, True)])
def test_a_dropped_cube_ends_the_episode(rules, below, ends):
    outcome = rules.reward_and_done(
        state_with(rules, place=PLACE - np.array([0, 0, below]), turn=[0.0, 1.0, 0.0, 0.0])
    )
    assert outcome.terminated.item() is ends
    assert outcome.rewards.item() == pytest.approx(1 / (math.pi + 0.1) - 10 * below)


def test_observation_by_hand(rules):
    # The cube, a quarter turn around x, spins around its own y: the world's z. The goal: a quarter turn around y.
    state = state_with(rules, turn=[HALF, HALF, 0, 0], goal=[HALF, 0, HALF, 0], actions=0.25)
    model, fields = rules.model, state.fields
    fields["qpos"][0, :24] = torch.from_numpy(model.jnt_range[:24, 1].copy())
    fields["qvel"][0, 2], fields["qvel"][0, 24], fields["qvel"][0, 28] = 3.0, 0.7, 2.0
    fields["qfrc_actuator"][0, 0], fields["qfrc_constraint"][0, 0] = 0.3, -0.1
    tip, force = (int(model.sensor(name).adr[0]) for name in ("mf_spin", "th_torque"))
    fields["sensordata"][0, tip + 2], fields["sensordata"][0, force] = 4.0, 0.02
    want = np.zeros(211)
    want[:24] = 1.0
    want[24 + 2] = 0.6
    want[48] = 2.0
    want[72:79] = [*PLACE, HALF, HALF, 0, 0]
    want[79] = 0.7
    want[84] = 0.4
    want[85:92] = [*PLACE, HALF, 0, HALF, 0]
    want[92:96] = [0.5, 0.5, -0.5, -0.5]  # (1 + i)(1 - j) / 2 = (1 + i - j - k) / 2
    want[96 + 13 + 12] = 4.0
    want[161 + 24 + 3] = 0.2
    want[191:] = 0.25
    np.testing.assert_allclose(rules.observe(state)[0].numpy(), want, atol=1e-12)


def test_actions_are_positions_between_the_limits_of_the_actuated_joints(rules):
    state = state_with(rules)
    ranges = np.array([rules.model.joint(name).range for name in DRIVEN])
    for action, want in ((-1.0, ranges[:, 0]), (1.0, ranges[:, 1]), (0.0, ranges.mean(1))):
        state.actions = torch.full((1, 20), action, dtype=torch.float64)
        np.testing.assert_allclose(rules.control(state)[0][0].numpy(), want, atol=1e-12)


def test_starts(rules):
    draws = torch.stack([torch.full((31,), share, dtype=torch.float64) for share in (0.0, 0.5, 1.0)])
    start = rules.start(draws)
    for row, share in enumerate((0.0, 0.5, 1.0)):
        joints = start.qpos[row, :24].numpy()
        for k, name in enumerate(JOINTS):
            low, high = rules.model.joint(name if name not in COUPLED else name[:2] + "J2").range
            assert joints[k] == pytest.approx(0.2 * (low + share * (high - low)))
        np.testing.assert_allclose(start.qpos[row, 24:27], PLACE + [0, 0, 0.04] + 0.02 * (share - 0.5))
    # Half a turn around y, then around x, each backwards or forwards; and none.
    np.testing.assert_allclose(
        start.qpos[:, 27:].abs(), [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 1]], atol=1e-12
    )
    np.testing.assert_allclose(start.memory["goal"], start.qpos[:, 27:], atol=1e-12)
    assert start.qvel.abs().max() == 0.0


def test_random_goals_are_spread_over_turns_around_x_and_y(rules):
    draws = torch.rand((4000, 31), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    goals = rules.start(draws).memory["goal"]
    np.testing.assert_allclose(torch.linalg.vector_norm(goals, dim=-1), 1.0, atol=1e-12)
    # E w^2 = E cos^2 E cos^2 of half angles spread over a half turn: 1/4 for each component.
    np.testing.assert_allclose(goals.square().mean(0), 0.25, atol=0.02)


class Reference:
    """One world stepped with MuJoCo and numpy alone, from the definition in the module's docstring."""

    def __init__(self, model, data, goal) -> None:
        self.model, self.data, self.goal, self.tolerance = model, data, goal, 0.4
        self.ranges = np.array([model.joint(name).range for name in JOINTS])

    def step(self, action, draws):
        m, d = self.model, self.data
        for name, a in zip(DRIVEN, action, strict=True):
            low, high = m.joint(name).range
            d.actuator(name).ctrl = low + (high - low) * (a + 1) / 2
        for _ in range(2):
            mujoco.mj_step(m, d)
        reward, dropped = self.reward(action, draws)
        return self.observation(action), reward, dropped

    def relative(self):
        inverse, relative = np.zeros(4), np.zeros(4)
        mujoco.mju_negQuat(inverse, self.goal)
        mujoco.mju_mulQuat(relative, self.data.joint("object").qpos[3:], inverse)
        return relative

    def reward(self, action, draws):
        away = np.linalg.norm(self.data.joint("object").qpos[:3] - PLACE)
        error = 2 * math.asin(min(np.linalg.norm(self.relative()[1:]), 1.0))
        reward = -10 * away + 1 / (error + 0.1) - 2e-4 * (action**2).sum()
        if error <= self.tolerance:
            reward += 250
            self.tolerance = max(0.1, 0.8 * self.tolerance)
            around, goal = np.zeros((2, 4)), np.zeros(4)
            for turn, axis, u in zip(around, ([1.0, 0, 0], [0, 1.0, 0]), draws, strict=True):
                mujoco.mju_axisAngle2Quat(turn, np.array(axis), math.pi * (2 * u - 1))
            mujoco.mju_mulQuat(goal, around[0], around[1])
            self.goal = goal
        return reward, away >= 0.24

    def observation(self, action):
        m, d = self.model, self.data
        q = np.array([d.joint(name).qpos[0] for name in JOINTS])
        qd = np.array([d.joint(name).qvel[0] for name in JOINTS])
        dofs = [int(m.joint(name).dofadr[0]) for name in JOINTS]
        low, high = self.ranges.T
        cube = d.joint("object")
        turned, spin = np.zeros(9), cube.qvel[3:]
        mujoco.mju_quat2Mat(turned, cube.qpos[3:])
        tips, forces = [], []
        for finger in FINGERS:
            name = f"{finger.lower()}_tip"
            quat, velocity = np.zeros(4), np.zeros(6)
            mujoco.mju_mat2Quat(quat, d.site(name).xmat)
            mujoco.mj_objectVelocity(m, d, mujoco.mjtObj.mjOBJ_SITE, m.site(name).id, velocity, 0)
            tips += [d.site(name).xpos, quat, velocity[3:], velocity[:3]]
            forces += [d.sensor(f"{finger.lower()}_{kind}").data for kind in ("force", "torque")]
        parts = (
            2 * (q - low) / (high - low) - 1,
            0.2 * qd,
            10 * (d.qfrc_actuator + d.qfrc_constraint)[dofs],
            cube.qpos,
            cube.qvel[:3],
            0.2 * turned.reshape(3, 3) @ spin,
            PLACE,
            self.goal,
            self.relative(),
            *tips,
            *(10 * force for force in forces),
            action,
        )
        return np.concatenate(parts)


def same_up_to_the_tips_signs(obs: np.ndarray, want: np.ndarray) -> np.ndarray:
    """``want`` with each fingertip's quaternion, computed another way, given the sign of ``obs``."""
    for k in range(5):
        quat = slice(96 + 13 * k + 3, 96 + 13 * k + 7)
        want[quat] *= np.sign(want[quat] @ obs[quat])
    return want


def test_twenty_steps_equal_a_loop_over_single_worlds():
    worlds = TaskWorlds(ShadowHand(), 3, seed=2)
    for _ in range(12):
        worlds.step(0.2 * worlds.random_actions())
    # Of the first world the goal is where the cube is: it is reached, and a new one is drawn.
    worlds.memory["goal"][:1] = worlds.worlds.fields["qpos"][:1, 27:]
    model = worlds.rules.model
    references = [Reference(model, worlds.data(i), worlds.memory["goal"][i].numpy()) for i in range(3)]
    best = 0.0
    for _ in range(20):
        actions, draws = worlds.random_actions(), worlds.draws(2)
        obs, rewards, dropped = worlds.step(0.2 * actions, draws)
        best = max(best, rewards.max().item())
        for i, reference in enumerate(references):
            want, reward, end = reference.step(0.2 * actions[i].numpy(), draws[i].numpy())
            want = same_up_to_the_tips_signs(obs[i].numpy(), want)
            np.testing.assert_allclose(obs[i].numpy(), want, rtol=1e-9, atol=1e-9)
            assert rewards[i].item() == pytest.approx(reward, rel=1e-9, abs=1e-9)
            assert bool(dropped[i]) == end
    assert best > 250.0


def test_distal_joints_follow_the_middle_ones_and_nothing_explodes():
    worlds = TaskWorlds(ShadowHand(), 8, seed=3)
    distal = [JOINTS.index(name) for name in COUPLED]
    apart, fastest = 0.0, 0.0
    for _ in range(60):
        worlds.step(worlds.random_actions())
        qpos, qvel = worlds.worlds.fields["qpos"], worlds.worlds.fields["qvel"]
        apart = max(apart, (qpos[:, distal] - qpos[:, [k - 1 for k in distal]]).abs().max().item())
        fastest = max(fastest, qvel[:, :24].abs().max().item())
    assert apart < 0.15
    assert fastest < 100.0


def test_a_hand_that_does_nothing_keeps_most_cubes():
    worlds = TaskWorlds(ShadowHand(), 16, seed=4)
    still, kept = torch.zeros((16, 20), dtype=torch.float64), torch.ones(16, dtype=torch.bool)
    for _ in range(90):
        kept &= ~worlds.step(still)[2]
    assert int(kept.sum()) >= 13


def test_seeds_reproduce_and_goals_differ_between_environments_and_episodes():
    make = make_env_factory("rayagi/ShadowHand-v0", kwargs={"max_episode_steps": 3})
    alike = [make(num_envs=3, first_env_index=0, seed=4, num_threads=threads) for threads in (1, 2)]
    one, two = (env.reset() for env in alike)
    assert torch.equal(one, two)
    goals = [one[:, 88:92]]
    actions = torch.full((3, 20), -0.2)
    for _ in range(3):
        one, two = (env.step(actions) for env in alike)
        assert torch.equal(one.obs, two.obs)
    assert len(one.final_ids) == 3
    goals.append(one.obs[:, 88:92])
    assert len(torch.unique(torch.cat(goals), dim=0)) == 6


@pytest.mark.parametrize(
    ("part", "name"), [("sensor", "lf_torque"), ("actuator", "THJ3"), ("joint", "object")]
)
def test_a_users_model_without_a_part_is_refused_by_name(tmp_path, part, name):
    text = (MODELS / "shadow_hand.xml").read_text()
    start = {"sensor": "<torque", "actuator": "<position", "joint": "<freejoint"}[part]
    lines = [line for line in text.splitlines() if not (start in line and f'name="{name}"' in line)]
    assert len(lines) == len(text.splitlines()) - 1
    file = tmp_path / "mine.xml"
    file.write_text("\n".join(lines))
    with pytest.raises(ModelError, match=f"mine.xml: it lacks the {part} {name}"):
        ShadowHand(xml_file=str(file)).load()
