"""Anymal: a quadruped follows velocity commands. Counterpart of IsaacGymEnvs' ``anymal.py``, with our own model.

Observation, 48 numbers, vectors in the base's frame:

    ==  ==========================================================================  ====================================
     3  2 x velocity of the base, m/s                                               base_lin_vel x linearVelocityScale
     3  0.25 x angular velocity of the base, rad/s                                  base_ang_vel x angularVelocityScale
     3  direction of gravity, a unit vector                                         projected_gravity
     3  commands: 2 x velocity ahead and to the left, m/s; 0.25 x turn, rad/s       commands_scaled
    12  joint positions minus the default pose, rad; LF, LH, RF, RH by HAA, HFE,    dof_pos_scaled
        KFE
    12  0.05 x joint velocities, rad/s                                              dof_vel x dofVelocityScale
    12  previous actions                                                            actions
    ==  ==========================================================================  ====================================

Reward of a step, never below 0:

    ================================================================================  ==================================
    exp(-4 e^2), e the error of the horizontal velocity, m/s, in the base's frame     linearVelocityXYRewardScale 1
    0.5 exp(-4 e^2), e the error of the turn, rad/s                                   angularVelocityZRewardScale 0.5
    -2.5e-5 x sum of squared torques, N m                                             torqueRewardScale -2.5e-5
    ================================================================================  ==================================

An episode terminates when the contact force on the base or a knee exceeds 1 N, and is truncated after 50 s, 2500 steps. An
action of 1 moves a joint's target by 0.5 rad from the default pose. The PD drives have a stiffness of 85 N m/rad, a damping
of 2 N m s/rad and a limit of 80 N m.

Differences from IsaacGymEnvs. There, rewards are also multiplied by the step's 0.02 s: returns here are 50 times as large.
Gravity is rotated from the world's frame into the base's; there it is the inverse rotation. Terminations use the contact's
normal force, there the whole force. The body is made of capsules and spheres, which collide with the floor only; joints have
an armature of 0.01 kg m2. 0.02 s is two substeps, as there.

Solver: Newton with elliptic cones, at most 20 iterations. Largest difference of a velocity, m/s or rad/s, from a step with
a converged solver, under random actions: 7e-4 on mujoco_cpu, 4e-4 on mujoco_warp (experiments.tasks.residuals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.tasks.rotations import rotate_back
from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

_LEGS = ("LF", "LH", "RF", "RH")
_JOINTS = tuple(f"{leg}_{joint}" for leg in _LEGS for joint in ("HAA", "HFE", "KFE"))
_CONTACTS = ("base_contact", *(f"{leg}_knee_contact" for leg in _LEGS))
_STANDING = (0.03, 0.4, -0.8, 0.03, -0.4, 0.8, -0.03, 0.4, -0.8, -0.03, -0.4, 0.8)
"""Joint positions of the default pose, rad, in the order of _JOINTS."""


@dataclass(frozen=True, kw_only=True)
class Anymal(Task):
    """A quadruped follows a velocity command, a new one in every episode."""

    frame_skip: int = 2
    max_speed_x: float = 2.0
    """Bound of the absolute forward command, m/s."""
    max_speed_y: float = 1.0
    """Bound of the absolute lateral command, m/s."""
    max_turn: float = 1.0
    """Bound of the absolute yaw rate command, rad/s."""

    description: ClassVar[str] = "a quadruped follows velocity commands"
    model_file: ClassVar[str] = "models/anymal.xml"
    max_episode_steps: ClassVar[int] = 2500
    action_dim: ClassVar[int] = 12
    obs_dim: ClassVar[int] = 48
    fields: ClassVar[tuple[str, ...]] = ("actuator_force", "sensordata")
    num_start_draws: ClassVar[int] = 27
    reward_terms: ClassVar[tuple[str, ...]] = ("velocity", "turn", "effort")
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "joint": ("root", *_JOINTS),
        "actuator": _JOINTS,
        "sensor": _CONTACTS,
    }

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> AnymalRules:
        """Bound to a model."""
        return AnymalRules(self, model, device=device, dtype=dtype)


class AnymalRules(TaskFunctions[Anymal]):
    """Anymal's functions. Memory: ``commands``, forward and leftward velocity, m/s, and yaw rate, rad/s, (N, 3)."""

    def __init__(
        self, task: Anymal, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        self.joints, self.speeds = self.joint(*_JOINTS)
        self.drives = self.actuator(*_JOINTS)
        self.contacts = self.sensor(*_CONTACTS)
        self.standing = self.constant(_STANDING)
        self.qpos0 = self.constant(model.qpos0)
        self.down = self.constant([0.0, 0.0, -1.0])
        self.command_limits = self.constant([task.max_speed_x, task.max_speed_y, task.max_turn])
        self.command_scale = self.constant([2.0, 2.0, 0.25])

    def start(self, draws: Tensor) -> Start:
        """Base at rest, 0.62 m high; joints at 0.5 to 1.5 times the default pose, with velocities in +-0.1 rad/s."""
        qpos = self.qpos0.repeat(len(draws), 1)
        qpos[:, self.joints] = self.standing * (0.5 + draws[:, :12])
        qvel = draws.new_zeros((len(draws), self.model.nv))
        qvel[:, self.speeds] = 0.2 * draws[:, 12:24] - 0.1
        return Start(qpos, qvel, {"commands": (2.0 * draws[:, 24:] - 1.0) * self.command_limits})

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Target joint positions, rad: default pose + 0.5 a."""
        return self.scatter_controls(self.drives, self.standing + 0.5 * state.actions), {}

    def _turned(self, state: State) -> tuple[Tensor, Tensor]:
        """The base's velocity and the direction of gravity in its frame."""
        qpos, qvel = state.fields["qpos"], state.fields["qvel"]
        vectors = torch.stack((qvel[:, :3], self.down.expand(len(qvel), 3)), 1)
        velocity, gravity = rotate_back(qpos[:, None, 3:7], vectors).unbind(1)
        return velocity, gravity

    def observe(self, state: State) -> Tensor:
        """The base's motion, commands, joints and actions: see the module."""
        qpos, qvel = state.fields["qpos"], state.fields["qvel"]
        velocity, gravity = self.memoize(state, self._turned)
        parts = (
            2.0 * velocity,
            0.25 * qvel[:, 3:6],
            gravity,
            state.memory["commands"] * self.command_scale,
            qpos[:, self.joints] - self.standing,
            0.05 * qvel[:, self.speeds],
            state.actions,
        )
        return torch.cat(parts, -1)

    def reward_and_done(self, state: State) -> StepOutcome:
        """Velocity tracking minus effort; terminates when the base or a knee touches the floor."""
        commands, (velocity, _) = state.memory["commands"], self.memoize(state, self._turned)
        velocity_error = (commands[:, :2] - velocity[:, :2]).square().sum(-1)  # |v* - v|^2, horizontal
        turn_error = (commands[:, 2] - state.fields["qvel"][:, 5]).square()  # (w* - w)^2, yaw rate
        # velocity: exp(-4 |v* - v|^2).  turn: 0.5 exp(-4 (w* - w)^2).  effort: 2.5e-5 sum torque^2
        tracking, turn = torch.exp(-4.0 * velocity_error), 0.5 * torch.exp(-4.0 * turn_error)
        effort = 2.5e-5 * state.fields["actuator_force"][:, self.drives].square().sum(-1)
        fallen = (state.fields["sensordata"][:, self.contacts] > 1.0).any(-1)  # contact force above 1 N
        terms = {"velocity": tracking, "turn": turn, "effort": -effort}
        return StepOutcome((tracking + turn - effort).clamp_min(0.0), fallen, terms=terms)
