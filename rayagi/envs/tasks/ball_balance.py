"""BallBalance: a tray on three legs balances a ball. Counterpart of IsaacGymEnvs' ``ball_balance.py``, with our own model.

Observation, 24 numbers:

    ==  ==========================================================================  ===================================
     3  knee angles, rad; 0 is a right angle, positive extends the leg              dof_positions, actuated
     3  knee velocities, rad/s                                                      dof_velocities, actuated
     3  the ball's position in the world, m                                         ball_positions
     3  the ball's velocity in the world, m/s                                       ball_linvels
     3  force of the tray on its plate, N / 20, in the tray's frame                 sensor_forces / 20
     9  that force's torques around the three hips, N m / 20, hip by hip            sensor_torques / 20
    ==  ==========================================================================  ===================================

Reward of a step: 1 / (1 + d) x 1 / (1 + v), d the ball's distance from the point 0.7 m above the origin, m (pos_reward),
and v its speed, m/s (speed_reward). An episode terminates when the ball's centre is lower than 1.5 radii, and is truncated
after 500 steps of 0.01 s. An action of 1 moves a knee's target at 20 rad/s, within the joint's limits (actionSpeedScale).

Differences from IsaacGymEnvs. Its code observes the x component of the force at three sensors of one body, which is three
times the same number. Here it is the whole force, as its comments say, and torques are ordered by hip instead of by axis.
The feet are pinned by equality constraints, there by stiff attractors. The sensors are between the tray's plate and its
frame, there on the tray as a whole. The knees have an armature, the legs do not collide with ball or floor, and 0.01 s is
two substeps (see the model).

Solver: Newton with elliptic cones, at most 20 iterations. Largest difference of a velocity, m/s or rad/s, from a step with
a converged solver, under random actions: 2e-4 on mujoco_cpu, 3e-4 on mujoco_warp (experiments.tasks.residuals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.tasks.task import Memory, Start, State, StepOutcome, Task, TaskFunctions

_KNEES = ("knee_0", "knee_1", "knee_2")
_LOADS = ("load_force", "load_torque_0", "load_torque_1", "load_torque_2")
_BALL_HEIGHT = 0.7
"""Target height of the ball above the origin, m: about its height when the legs are in the middle of their range."""


@dataclass(frozen=True, kw_only=True)
class BallBalance(Task):
    """A ball falls onto a tray on three legs, which brings it to rest above the origin."""

    frame_skip: int = 2
    action_speed: float = 20.0
    """Velocity of a knee's target under an action of 1, rad/s."""

    description: ClassVar[str] = "a tray on three legs catches a ball and holds it"
    model_file: ClassVar[str] = "models/ball_balance.xml"
    max_episode_steps: ClassVar[int] = 500
    action_dim: ClassVar[int] = 3
    obs_dim: ClassVar[int] = 24
    fields: ClassVar[tuple[str, ...]] = ("sensordata",)
    num_start_draws: ClassVar[int] = 4
    reward_terms: ClassVar[tuple[str, ...]] = ("position", "speed")
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "joint": ("ball", *_KNEES),
        "actuator": _KNEES,
        "sensor": _LOADS,
        "geom": ("ball",),
    }

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> BallBalanceRules:
        """Bound to a model."""
        return BallBalanceRules(self, model, device=device, dtype=dtype)


class BallBalanceRules(TaskFunctions[BallBalance]):
    """BallBalance's functions. Memory: ``targets``, the knees' target positions, rad, (N, 3)."""

    def __init__(
        self, task: BallBalance, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        knees, ball = [model.joint(name) for name in _KNEES], model.joint("ball")
        self.knees, self.knee_speeds = self.joint(*_KNEES)
        self.drives = self.actuator(*_KNEES)
        self.low, self.high = (self.constant([float(knee.range[k]) for knee in knees]) for k in (0, 1))
        place, speed = int(ball.qposadr[0]), int(ball.dofadr[0])
        self.ball, self.ball_velocity = slice(place, place + 3), slice(speed, speed + 3)
        self.loads = self.sensor(*_LOADS)
        self.lowest = 1.5 * float(model.geom("ball").size[0])
        self.wanted = self.constant([0.0, 0.0, _BALL_HEIGHT])
        self.qpos0 = self.constant(model.qpos0)

    def start(self, draws: Tensor) -> Start:
        """The legs as in the model; the ball 1 to 2 m high and up to 0.5 m from the axis, falling at 5 m/s. It also moves
        towards the axis, at up to 5 m/s in proportion to its distance.
        """
        distance, angle, speed, height = draws.unbind(-1)  # U[0, 1) each
        aside = torch.stack((torch.cos(2.0 * pi * angle), torch.sin(2.0 * pi * angle)), -1)
        qpos = self.qpos0.repeat(len(draws), 1)
        qvel = draws.new_zeros((len(draws), self.model.nv))
        ball, velocity = qpos[:, self.ball], qvel[:, self.ball_velocity]
        ball[:, :2] = (0.001 + 0.499 * distance).unsqueeze(-1) * aside
        ball[:, 2] = 1.0 + height
        velocity[:, :2] = -(5.0 * distance * speed).unsqueeze(-1) * aside
        velocity[:, 2] = -5.0
        return Start(qpos, qvel, {"targets": qpos[:, self.knees]})

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Integrate the actions: target += dt x action_speed x a, clamped to the joints' limits."""
        moved = state.memory["targets"] + self.dt * self.task.action_speed * state.actions
        targets = torch.minimum(torch.maximum(moved, self.low), self.high)
        return self.scatter_controls(self.drives, targets), {"targets": targets}

    def observe(self, state: State) -> Tensor:
        """Knees, ball and loads: see the module."""
        qpos, qvel = state.fields["qpos"], state.fields["qvel"]
        parts = (
            qpos[:, self.knees],
            qvel[:, self.knee_speeds],
            qpos[:, self.ball],
            qvel[:, self.ball_velocity],
            state.fields["sensordata"][:, self.loads] / 20.0,
        )
        return torch.cat(parts, -1)

    def reward_and_done(self, state: State) -> StepOutcome:
        """1 / (1 + d) x 1 / (1 + v); terminates when the ball falls off. The two factors are the reward terms."""
        ball = state.fields["qpos"][:, self.ball]
        distance = torch.linalg.vector_norm(ball - self.wanted, dim=-1)  # d, m
        speed = torch.linalg.vector_norm(state.fields["qvel"][:, self.ball_velocity], dim=-1)  # v, m/s
        terms = {"position": 1.0 / (1.0 + distance), "speed": 1.0 / (1.0 + speed)}
        return StepOutcome(1.0 / ((1.0 + distance) * (1.0 + speed)), ball[:, 2] < self.lowest, terms=terms)
