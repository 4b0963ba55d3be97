"""ShadowHand: in-hand reorientation of a cube. Counterpart of IsaacGymEnvs' ``shadow_hand.py`` with its full state.

Observation, 211 numbers; positions, velocities and orientations are in the world's frame, quaternions are w, x, y, z:

    ==  =========================================================================  ===================================
    24  joint positions, scaled to [-1, 1] by their limits                         unscale(shadow_hand_dof_pos)
    24  0.2 x joint velocities, rad/s                                              vel_obs_scale * shadow_hand_dof_vel
    24  10 x torques at the joints, N m                                            force_torque_obs_scale * dof_force
     7  cube's position, m, and orientation                                        object_pose
     3  its velocity, m/s                                                          object_linvel
     3  0.2 x its angular velocity, rad/s                                          vel_obs_scale * object_angvel
     7  goal's position and orientation                                            goal_pose
     4  rotation from the goal's orientation to the cube's                         quat_mul(object_rot, conj(goal_rot))
    65  five fingertips' positions 3, orientations 4, linear 3, angular velocity 3 fingertip_state
    30  10 x five fingertips' forces 3, N, and torques 3, N m, in their own frame  vec_sensor_tensor
    20  previous action                                                            actions
    ==  =========================================================================  ===================================

Reward of a step, with d the distance of the cube from its target position, m, and e the angle between its orientation and
the goal, rad:

    ==========================================  =======================================================================
    -10 d                                       dist_reward_scale -10
    1 / (e + 0.1)                               rot_reward_scale 1, rot_eps 0.1
    -0.0002 sum of squared actions              action_penalty_scale -0.0002
    250 where e <= tolerance, and a new goal    reach_goal_bonus 250, success_tolerance 0.1
    ==========================================  =======================================================================

The tolerance is a curriculum within the episode: ``first_tolerance`` for the first goal, multiplied by 0.8 after each goal,
down to ``last_tolerance`` (0.4, 0.32, 0.26, 0.20, 0.16, 0.13, 0.10 rad). Each world has its own tolerance, so GMIs do not
have to synchronise it. For a constant tolerance, set both to it.

An episode terminates if d >= 0.24 m (the cube is dropped), and is truncated after 600 steps. An action is the target
position of the 20 actuated joints, between their limits; the fingers' distal joints follow the middle ones.

Differences from IsaacGymEnvs. The tolerance shrinks; there it is 0.1 rad throughout. Quaternions there are x, y, z, w.
The hand is our own model, of capsules that collide with the cube and not with each other. Its distal joints are coupled by
an equality constraint, there by a tendon of little play. It has its own weight, which is switched off there. The cube starts
above this hand's palm. Torques at the joints are those of actuators, contacts, limits and coupling. A new goal is
observed at once, there one step later. 1/60 s is two substeps of MuJoCo.

Solver: Newton with elliptic cones, at most 20 iterations. Largest difference of a velocity, m/s or rad/s, from a step with
a converged solver, under random actions: 7e-4 on mujoco_cpu, 1.2e-3 on mujoco_warp (experiments.tasks.residuals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.tasks.rotations import angle_between, conjugate, from_axis_angle, multiply, rotate
from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

_COUPLED = ("FF", "MF", "RF", "LF")
_DRIVEN = (
    *("WRJ2", "WRJ1"),
    *(f"{finger}J{k}" for finger in ("FF", "MF", "RF") for k in (4, 3, 2)),
    *(f"LFJ{k}" for k in (5, 4, 3, 2)),
    *(f"THJ{k}" for k in (5, 4, 3, 2, 1)),
)
"""Actuated joints, in the order of the actions: the wrist, and each finger from its root."""
_JOINTS = (
    *("WRJ2", "WRJ1"),
    *(f"{finger}J{k}" for finger in ("FF", "MF", "RF") for k in (4, 3, 2, 1)),
    *(f"LFJ{k}" for k in (5, 4, 3, 2, 1)),
    *(f"THJ{k}" for k in (5, 4, 3, 2, 1)),
)
_TIPS = ("ff", "mf", "rf", "lf", "th")
_SENSORS = (
    *(f"{tip}_{kind}" for tip in _TIPS for kind in ("place", "turn", "velocity", "spin")),
    *(f"{tip}_{kind}" for tip in _TIPS for kind in ("force", "torque")),
)
_GOAL_BENEATH_START = 0.04
_DROPPED = 0.24
_NARROWING = 0.8
"""Ratio of the next goal's tolerance to that of the goal just reached."""


@dataclass(frozen=True, kw_only=True)
class ShadowHand(Task):
    """A hand turns a cube to goal after goal."""

    frame_skip: int = 2
    place_noise: float = 0.01
    """Half width of the uniform noise on the cube's initial position, m."""
    joint_noise: float = 0.2
    """Noise on the initial joint positions, as a fraction of the joints' ranges."""
    first_tolerance: float = 0.4
    """Angle at which an episode's first goal counts as reached, rad."""
    last_tolerance: float = 0.1
    """Smallest tolerance, rad."""

    description: ClassVar[str] = "a hand turns a cube to one orientation after the other"
    model_file: ClassVar[str] = "models/shadow_hand.xml"
    max_episode_steps: ClassVar[int] = 600
    action_dim: ClassVar[int] = 20
    obs_dim: ClassVar[int] = 211
    fields: ClassVar[tuple[str, ...]] = ("sensordata", "qfrc_actuator", "qfrc_constraint")
    num_start_draws: ClassVar[int] = 31
    num_step_draws: ClassVar[int] = 2
    reward_terms: ClassVar[tuple[str, ...]] = ("rotation", "distance", "effort", "goals")
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "joint": (*_JOINTS, "object"),
        "actuator": _DRIVEN,
        "sensor": _SENSORS,
    }

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> ShadowHandRules:
        """Bound to a model."""
        return ShadowHandRules(self, model, device=device, dtype=dtype)


class ShadowHandRules(TaskFunctions[ShadowHand]):
    """Its functions. Memory: ``goal``, the orientation to reach, (N, 4); ``tolerance`` of it, rad, (N,)."""

    def __init__(
        self, task: ShadowHand, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        self.positions, self.speeds = self.joint(*_JOINTS)
        self.actuators, self.sensors = self.actuator(*_DRIVEN), self.sensor(*_SENSORS)
        cube = model.joint("object")
        self.cube, self.cube_speed = int(cube.qposadr[0]), int(cube.dofadr[0])
        ranges = [model.joint(name).range for name in _JOINTS]
        self.low, self.high = (self.constant([float(limits[k]) for limits in ranges]) for k in (0, 1))
        self.middle, self.half = (self.high + self.low) / 2, (self.high - self.low) / 2
        driven = [_JOINTS.index(name) for name in _DRIVEN]
        self.driven_middle, self.driven_half = self.middle[driven], self.half[driven]
        # Index of the random number for each joint's initial position: a coupled joint shares its neighbour's.
        self.drawn = torch.tensor(
            [k - 1 if name.endswith("J1") and name[:2] in _COUPLED else k for k, name in enumerate(_JOINTS)],
            device=device,
        )
        self.force_scale = self.constant([1.0] * 65 + [10.0] * 30)
        self.qpos0 = self.constant(model.qpos0)
        self.place = self.qpos0[self.cube : self.cube + 3].clone()
        self.place[2] -= _GOAL_BENEATH_START
        self.x, self.y = self.constant([1.0, 0.0, 0.0]), self.constant([0.0, 1.0, 0.0])

    def _turn(self, draws: Tensor) -> Tensor:
        """Orientations from uniform numbers (M, 2): rotations in [-pi, pi) around y, then around x."""
        angles = torch.pi * (2.0 * draws - 1.0)
        return multiply(from_axis_angle(self.x, angles[:, 0]), from_axis_angle(self.y, angles[:, 1]))

    def start(self, draws: Tensor) -> Start:
        """The hand nearly straight, the cube above the palm; random orientations of cube and goal."""
        qpos = self.qpos0.repeat(len(draws), 1)
        spread = self.task.joint_noise * (self.low + (self.high - self.low) * draws[:, :24])
        qpos[:, self.positions] = spread[:, self.drawn]
        qpos[:, self.cube : self.cube + 3] += self.task.place_noise * (2.0 * draws[:, 24:27] - 1.0)
        qpos[:, self.cube + 3 : self.cube + 7] = self._turn(draws[:, 27:29])
        tolerance = draws.new_zeros((len(draws),)) + self.task.first_tolerance
        memory = {"goal": self._turn(draws[:, 29:31]), "tolerance": tolerance}
        return Start(qpos, draws.new_zeros((len(draws), self.model.nv)), memory)

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Target positions of the actuated joints, rad: [-1, 1] scaled to the joints' limits."""
        targets = self.driven_middle + self.driven_half * state.actions
        return self.scatter_controls(self.actuators, targets), {}

    def _pose(self, state: State) -> Tensor:
        """The cube's position and orientation, (N, 7)."""
        return state.fields["qpos"][:, self.cube : self.cube + 7]

    def observe(self, state: State) -> Tensor:
        """Observations: the module's first table, row by row."""
        fields, pose, goal = state.fields, self._pose(state), state.memory["goal"]
        torques = fields["qfrc_actuator"][:, self.speeds] + fields["qfrc_constraint"][:, self.speeds]
        spin = fields["qvel"][:, self.cube_speed + 3 : self.cube_speed + 6]  # in the cube's own frame
        parts = (
            (fields["qpos"][:, self.positions] - self.middle) / self.half,
            0.2 * fields["qvel"][:, self.speeds],
            10.0 * torques,
            pose,
            fields["qvel"][:, self.cube_speed : self.cube_speed + 3],
            0.2 * rotate(pose[:, 3:], spin),
            self.place.expand(len(pose), 3),
            goal,
            multiply(pose[:, 3:], conjugate(goal)),
            fields["sensordata"][:, self.sensors] * self.force_scale,
            state.actions,
        )
        return torch.cat(parts, -1)

    def reward_and_done(self, state: State) -> StepOutcome:
        """1 / (e + 0.1) - 10 d - 0.0002 sum a^2 + 250 [goal reached]; terminates when the cube is dropped."""
        pose, goal, tolerance = self._pose(state), state.memory["goal"], state.memory["tolerance"]
        away = torch.linalg.vector_norm(pose[:, :3] - self.place, dim=-1)  # d, m
        error = angle_between(pose[:, 3:], goal)  # e, rad
        reached = error <= tolerance
        rotation, distance, goals = 1.0 / (error + 0.1), 10.0 * away, 250.0 * reached
        effort = 0.0002 * state.actions.square().sum(-1)
        terms = {"rotation": rotation, "distance": -distance, "effort": -effort, "goals": goals}
        # Where the goal is reached: a new random goal, and a tolerance of max(0.8 x tolerance, last_tolerance).
        goal = torch.where(reached.unsqueeze(-1), self._turn(state.draws), goal)
        narrower = (_NARROWING * tolerance).clamp(min=self.task.last_tolerance)
        tolerance = torch.where(reached, narrower, tolerance)
        memory = {"goal": goal, "tolerance": tolerance}
        return StepOutcome(rotation - distance - effort + goals, away >= _DROPPED, memory, terms)
