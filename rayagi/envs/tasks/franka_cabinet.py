"""FrankaCabinet: a Franka Panda arm opens a drawer. Counterpart of IsaacGymEnvs' ``franka_cabinet.py``, with our own model.

Observation, 23 numbers:

    ==  =====================================================================================  =========================
     9  joint positions, scaled to [-1, 1] by their limits: seven of the arm, two fingers      dof_pos_scaled
     9  0.1 x joint velocities, rad/s and m/s                                                  dof_vel * dof_vel_scale
     3  from the grasp point to the middle of the handle, m, in the world's frame              to_target
     1  opening of the drawer, m                                                               cabinet_dof_pos[:, 3]
     1  its velocity, m/s                                                                      cabinet_dof_vel[:, 3]
    ==  =====================================================================================  =========================

Reward of a step, with d the distance from grasp point to handle, l and r the fingers' heights from it, all in metres:

    ===============================================================================  ===================================
    2 / (1 + d^2)^2, twice that within 0.02 m                                        dist_reward_scale 2
    0.25 (f |f| + u |u|): f, u the cosines of the hand's forward and up axes with    rot_reward_scale 0.5
    the drawer's inward and up axes
    0.125 while the fingers straddle the handle: the left one above, the right below around_handle_reward_scale 0.25 x 0.5
    5 ((0.04 - l) + (0.04 - r)) while they straddle it                               finger_dist_reward_scale 5
    7.5 x opening, 1.5 times that while they straddle it                             open_reward_scale 7.5
    -0.01 sum of squared actions                                                     action_penalty_scale 0.01
    0.5 above 0.01 m; 0.5 above 0.2 m and 1 above 0.39 m while they straddle it      the bonuses for opening
    -1 in place of all terms if a finger is 0.04 m behind the handle                 distX_offset 0.04
    ===============================================================================  ===================================

An episode terminates when the drawer is open by more than 0.39 m, and is truncated after 500 steps. An action moves the
joints' targets, at up to 7.5 rad/s (the fingers 0.75 m/s), within the joints' limits.

Differences from IsaacGymEnvs. The cabinet is a box with one drawer (no doors, no props), its handle 0.32 m in front of the
cabinet's middle and 0.7 m high. The grasp point and the fingers' positions are between and on their tips; there they are
at the fingers' roots, the former moved by 0.04 m. The fingers press with up to 70 N (there 200), with a stiffness of 2 kN/m
(there 1 MN/m). Joint damping limits the arm under full torque to its rated speeds, 2.175 and 2.61 rad/s. 1/60 s is two
substeps of MuJoCo.

Solver: Newton with elliptic cones, at most 20 iterations. Largest difference of a velocity, m/s or rad/s, from a step with
a converged solver, under random actions, which touch nothing: 3e-7 on mujoco_cpu, 1e-6 on mujoco_warp
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
"""Initial joint positions: the arm's in rad, the fingers' in m (IsaacGymEnvs' franka_default_dof_pos)."""
_PAST_HANDLE = 0.04
_OPEN = 0.39


@dataclass(frozen=True, kw_only=True)
class FrankaCabinet(Task):
    """An arm grasps the handle of a drawer and pulls it out."""

    frame_skip: int = 2
    action_scale: float = 7.5
    """Velocity of the targets under an action of 1, rad/s."""
    start_noise: float = 0.125
    """Half width of the uniform noise on the initial joint positions, rad (fingers m, within their limits)."""

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
    """FrankaCabinet's functions. Memory: ``targets``, the joints' target positions, rad and m, (N, 9)."""

    def __init__(
        self, task: FrankaCabinet, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        self.positions, self.speeds = self.joint(*_JOINTS)
        self.drawer, self.drawer_speed = self.joint("drawer")
        self.actuators, self.sensors = self.actuator(*_JOINTS), self.sensor(*_SENSORS)
        ranges = [model.joint(name).range for name in _JOINTS]
        self.low, self.high = (self.constant([float(limits[k]) for limits in ranges]) for k in (0, 1))
        # Change of the targets under an action of 1; the fingers' targets move at a tenth of the arm's speed.
        self.stride = self.constant([1.0] * 7 + [0.1] * 2) * (task.action_scale * self.dt)
        self.middle, self.half = (self.high + self.low) / 2, (self.high - self.low) / 2
        self.qpos0 = self.constant(model.qpos0)
        self.begin = self.constant(_START)

    def start(self, draws: Tensor) -> Start:
        """The arm at its initial positions plus noise, the drawer closed."""
        noise = (2.0 * draws - 1.0) * self.task.start_noise
        joints = torch.minimum(torch.maximum(self.begin + noise, self.low), self.high)
        qpos = self.qpos0.repeat(len(draws), 1)
        qpos[:, self.positions] = joints
        return Start(qpos, draws.new_zeros((len(draws), self.model.nv)), {"targets": joints})

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Integrate the actions: target += stride x a, clamped to the joints' limits."""
        targets = state.memory["targets"] + self.stride * state.actions
        targets = torch.minimum(torch.maximum(targets, self.low), self.high)
        return self.scatter_controls(self.actuators, targets), {"targets": targets}

    def observe(self, state: State) -> Tensor:
        """Observations: the module's first table, row by row."""
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
        """Rewards: the module's second table, row by row."""
        opening = state.fields["qpos"][:, self.drawer].squeeze(-1)
        # (sensor, axis, N): with the worlds contiguous in memory this is twice as fast for hundreds of them.
        sensors = state.fields["sensordata"][:, self.sensors].T.contiguous().unflatten(0, (8, 3))
        grasp, handle, fingers = sensors[0], sensors[1], sensors[2:4]
        # near: 2 / (1 + d^2)^2, doubled if d <= 0.02 m
        squared = (grasp - handle).square().sum(0)  # d^2
        near = 2.0 / (1.0 + squared).square()
        near = torch.where(squared <= 0.02**2, 2.0 * near, near)

        # alignment: 0.25 (u |u| + f |f|). The handle's axis points outward, so that f = -forward.
        forward, up = (sensors[4:6] * sensors[6:8]).sum(1)
        alignment = 0.25 * (up * up.abs() - forward * forward.abs())

        left, right = fingers[:, 2] - handle[2]  # heights above the handle, m
        straddles = (left > 0.0) & (right < 0.0)
        # grip: 0.125 + 5 ((0.04 - l) + (0.04 - r)), with l = left and r = -right while they straddle the handle
        grip = 0.125 + 5.0 * (2 * 0.04 - (left - right))
        pull = 7.5 * opening
        bonus = 0.5 * (opening > 0.01)
        # Added only while the fingers straddle the handle.
        with_handle = grip + 0.5 * pull + 0.5 * (opening > 0.2) + 1.0 * (opening > _OPEN)
        effort = 0.01 * state.actions.square().sum(-1)
        held = straddles * with_handle
        rewards = near + alignment + pull + bonus + held - effort

        # A finger behind the handle: -1 replaces all terms.
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
