"""A Franka Panda arm pulls a drawer open: IsaacGymEnvs' ``franka_cabinet.py``, on a model of our own.

Observation, 23 numbers:

    ==  =====================================================================================  =========================
     9  joints' positions, scaled to [-1, 1] by their limits: seven of the arm, two fingers    dof_pos_scaled
     9  0.1 x joints' speeds, rad/s and m/s                                                    dof_vel * dof_vel_scale
     3  from the grasp point to the middle of the handle, m, in the world's frame              to_target
     1  how far the drawer is out, m                                                           cabinet_dof_pos[:, 3]
     1  its speed, m/s                                                                         cabinet_dof_vel[:, 3]
    ==  =====================================================================================  =========================

Reward of a step, with d the distance from grasp point to handle, l and r the fingers' heights from it, all in metres:

    ===============================================================================  ===================================
    2 / (1 + d^2)^2, twice that within 0.02 m                                        dist_reward_scale 2
    0.25 (f |f| + u |u|): the hand points into the drawer (f), its up is up (u)      rot_reward_scale 0.5
    0.125 while the fingers straddle the handle: the left one above, the right below around_handle_reward_scale 0.25 x 0.5
    5 ((0.04 - l) + (0.04 - r)) while they straddle it                               finger_dist_reward_scale 5
    7.5 x opening, 1.5 times that while they straddle it                             open_reward_scale 7.5
    -0.01 sum of squared actions                                                     action_penalty_scale 0.01
    0.5 above 0.01 m; 0.5 above 0.2 m and 1 above 0.39 m while they straddle it      the bonuses for opening
    instead of all that -1 where a finger is 0.04 m behind the handle                distX_offset 0.04
    ===============================================================================  ===================================

An episode ends with the drawer out by more than 0.39 m, and is cut off after 500 steps. An action moves the joints' targets,
at up to 7.5 rad/s (the fingers 0.75 m/s), within the joints' limits.

Differences from IsaacGymEnvs. The cabinet is a box with one drawer (no doors, no props), its handle 0.32 m before the
cabinet's middle and 0.7 m high. The grasp point and the fingers' places are between and on their tips; there they are
at the fingers' roots, the former moved by 0.04 m. The fingers press with up to 70 N (there 200), on a spring of 2 kN/m
(there 1 MN/m). Joints have damping that lets full torque move them at the arm's greatest speeds, 2.175 and 2.61 rad/s.
1/60 s is two substeps of MuJoCo.

Solver: Newton with elliptic cones, at most 20 iterations. Beside a step whose solver has converged, the largest difference
of a speed, m/s or rad/s, in random play, which touches nothing: 3e-7 on mujoco_cpu, 1e-6 on mujoco_warp
(experiments.tasks.residuals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

_JOINTS = (*(f"joint{i}" for i in range(1, 8)), "finger1", "finger2")
_SENSORS = (
    "grasp",
    "handle",
    "left_finger",
    "right_finger",
    "grasp_forward",
    "grasp_up",
    "handle_outward",
    "handle_up",
)
_START = (1.157, -1.066, -0.155, -2.239, -1.841, 1.003, 0.469, 0.035, 0.035)
"""Where an episode begins: the arm's angles in rad, the fingers' openings in m (IsaacGymEnvs' franka_default_dof_pos)."""
_PAST_HANDLE = 0.04
_OPEN = 0.39


@dataclass(frozen=True, kw_only=True)
class FrankaCabinet(Task):
    """An arm grasps the handle of a drawer and pulls it out."""

    frame_skip: int = 2
    action_scale: float = 7.5
    """Speed of the targets under a full action, rad/s."""
    start_noise: float = 0.125
    """Half width of the uniform noise on the joints' first positions, rad (fingers m, within their limits)."""

    description: ClassVar[str] = "an arm pulls a drawer open by its handle"
    model_file: ClassVar[str] = "models/franka_cabinet.xml"
    max_episode_steps: ClassVar[int] = 500
    action_dim: ClassVar[int] = 9
    obs_dim: ClassVar[int] = 23
    fields: ClassVar[tuple[str, ...]] = ("sensordata",)
    num_start_draws: ClassVar[int] = 9
    reward_terms: ClassVar[tuple[str, ...]] = (
        "near",
        "alignment",
        "pull",
        "opened",
        "grip",
        "effort",
        "past",
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "joint": (*_JOINTS, "drawer"),
        "actuator": _JOINTS,
        "sensor": _SENSORS,
    }

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> FrankaCabinetRules:
        """Bound to a model."""
        return FrankaCabinetRules(self, model, device=device, dtype=dtype)


class FrankaCabinetRules(TaskFunctions[FrankaCabinet]):
    """Its functions. Memory: ``targets``, where the joints are told to go, rad and m, (N, 9)."""

    def __init__(
        self, task: FrankaCabinet, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        self.positions, self.speeds = self.joint(*_JOINTS)
        self.drawer, self.drawer_speed = self.joint("drawer")
        self.actuators, self.sensors = self.actuator(*_JOINTS), self.sensor(*_SENSORS)
        ranges = [model.joint(name).range for name in _JOINTS]
        self.low, self.high = (self.constant([float(limits[k]) for limits in ranges]) for k in (0, 1))
        # Of an action: the fingers are told to move at a tenth of the arm's speed.
        self.stride = self.constant([1.0] * 7 + [0.1] * 2) * (task.action_scale * self.dt)
        self.middle, self.half = (self.high + self.low) / 2, (self.high - self.low) / 2
        self.qpos0 = self.constant(model.qpos0)
        self.begin = self.constant(_START)

    def start(self, draws: Tensor) -> Start:
        """The arm near its usual place, the drawer shut."""
        noise = (2.0 * draws - 1.0) * self.task.start_noise
        joints = torch.minimum(torch.maximum(self.begin + noise, self.low), self.high)
        qpos = self.qpos0.repeat(len(draws), 1)
        qpos[:, self.positions] = joints
        return Start(qpos, draws.new_zeros((len(draws), self.model.nv)), {"targets": joints})

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Positions for the joints' drives to go to."""
        targets = state.memory["targets"] + self.stride * state.actions
        targets = torch.minimum(torch.maximum(targets, self.low), self.high)
        return self.scatter_controls(self.actuators, targets), {"targets": targets}

    def observe(self, state: State) -> Tensor:
        """See the module."""
        qpos, qvel = state.fields["qpos"], state.fields["qvel"]
        places = state.fields["sensordata"][:, self.sensors]
        parts = (
            (qpos[:, self.positions] - self.middle) / self.half,
            0.1 * qvel[:, self.speeds],
            places[:, 3:6] - places[:, :3],
            qpos[:, self.drawer],
            qvel[:, self.drawer_speed],
        )
        return torch.cat(parts, -1)

    def reward_and_done(self, state: State) -> StepOutcome:
        """See the module."""
        opening = state.fields["qpos"][:, self.drawer].squeeze(-1)
        # By sensor and axis, the batch last in memory: twice as fast for hundreds.
        sensors = state.fields["sensordata"][:, self.sensors].T.contiguous().unflatten(0, (8, 3))
        grasp, handle, fingers = sensors[0], sensors[1], sensors[2:4]
        squared = (grasp - handle).square().sum(0)
        near = 2.0 / (1.0 + squared).square()
        near = torch.where(squared <= 0.02**2, 2.0 * near, near)

        # The hand's forward axis against the handle's outward one, its up axis against the handle's.
        forward, up = (sensors[4:6] * sensors[6:8]).sum(1)
        alignment = 0.25 * (up * up.abs() - forward * forward.abs())

        left, right = fingers[:, 2] - handle[2]
        straddles = (left > 0.0) & (right < 0.0)
        grip = 0.125 + 5.0 * (2 * 0.04 - (left - right))  # of their distances, as one is above and one below
        pull = 7.5 * opening
        bonus = 0.5 * (opening > 0.01)
        with_handle = grip + 0.5 * pull + 0.5 * (opening > 0.2) + 1.0 * (opening > _OPEN)
        effort = 0.01 * state.actions.square().sum(-1)
        held = straddles * with_handle
        rewards = near + alignment + pull + bonus + held - effort

        past = fingers[:, 0].amin(0) < handle[0] - _PAST_HANDLE
        raw_terms = {
            "near": near,
            "alignment": alignment,
            "pull": pull,
            "opened": bonus,
            "grip": held,
            "effort": -effort,
        }
        terms = {name: value.masked_fill(past, 0.0) for name, value in raw_terms.items()} | {
            "past": -1.0 * past
        }
        return StepOutcome(torch.where(past, -1.0, rewards), opening > _OPEN, terms=terms)
