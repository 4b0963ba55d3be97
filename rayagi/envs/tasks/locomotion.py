"""Running robots paid for progress towards a far target: Ant (IsaacGymEnvs' ``ant.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mujoco
import torch
from torch import Tensor

from rayagi.envs.tasks.rotations import roll, rotate, rotate_back, yaw
from rayagi.envs.tasks.task import Memory, Outcome, Rules, Start, State, Task

_LEGS = ("front_left", "front_right", "back_left", "back_right")
_JOINTS = tuple(f"{leg}_{joint}" for leg in _LEGS for joint in ("hip", "ankle"))
_FEET = tuple(f"{leg}_foot_{kind}" for leg in _LEGS for kind in ("force", "torque"))


@dataclass(frozen=True, kw_only=True)
class Ant(Task):
    """A four-legged robot runs along x."""

    frame_skip: int = 2
    reset_noise: float = 0.2
    """Half width of the uniform noise on the joints' positions, rad; on their speeds half of it, rad/s."""

    description: ClassVar[str] = "a four-legged robot runs to a far target"
    model_file: ClassVar[str] = "ant.xml"
    action_dim: ClassVar[int] = 8
    obs_dim: ClassVar[int] = 60
    fields: ClassVar[tuple[str, ...]] = ("sensordata",)
    num_start_draws: ClassVar[int] = 16
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "body": ("torso",),
        "joint": _JOINTS,
        "actuator": _JOINTS,
        "sensor": _FEET,
    }

    def rules(self, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> AntRules:
        """Bound to a model."""
        return AntRules(self, model, device=device, dtype=dtype)


class AntRules(Rules[Ant]):
    """Ant's functions. Memory: ``distance``, metres to the target before the step, (N,)."""

    def __init__(self, task: Ant, model: mujoco.MjModel, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(task, model, device=device, dtype=dtype)
        joints = [model.joint(name) for name in _JOINTS]
        low, high = (self.constant([float(j.range[k]) for j in joints]) for k in (0, 1))
        self.middle, self.half = (high + low) / 2, (high - low) / 2
        self.feet = self.sensor(*_FEET)
        self.qpos0 = self.constant(model.qpos0)
        self.qpos0[7:] = torch.minimum(torch.maximum(self.qpos0[7:], low), high)
        self.target = self.constant([1000.0, 0.0])
        self.up, self.forward = self.constant([0.0, 0.0, 1.0]), self.constant([1.0, 0.0, 0.0])

    def start(self, draws: Tensor) -> Start:
        """Noise on the joints."""
        noise = (2.0 * draws - 1.0) * self.task.reset_noise
        qpos = self.qpos0.repeat(len(draws), 1)
        low, high = self.middle - self.half, self.middle + self.half
        qpos[:, 7:] = torch.minimum(torch.maximum(qpos[:, 7:] + noise[:, :8], low), high)
        qvel = draws.new_zeros((len(draws), self.model.nv))
        qvel[:, 6:] = 0.5 * noise[:, 8:]
        return Start(qpos, qvel, {"distance": self._distance(qpos)})

    def _distance(self, qpos: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self.target - qpos[:, :2], dim=-1)

    def control(self, state: State) -> tuple[Tensor, Memory]:
        """Torques, as shares of the motors' gear."""
        return state.actions, {"distance": self._distance(state.fields["qpos"])}

    def _joints(self, state: State) -> tuple[Tensor, Tensor]:
        """Positions scaled to [-1, 1] by their limits, and speeds."""
        return (state.fields["qpos"][:, 7:] - self.middle) / self.half, state.fields["qvel"][:, 6:]

    def _projections(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """How upright, how much the body points to the target, and the angle to it."""
        qpos = state.fields["qpos"]
        quat = qpos[:, 3:7]
        up = rotate(quat, self.up.expand(len(qpos), 3))[:, 2]
        to_target = self.target - qpos[:, :2]
        angle = torch.atan2(to_target[:, 1], to_target[:, 0])
        ahead = rotate(quat, self.forward.expand(len(qpos), 3))[:, :2]
        heading = (ahead * to_target).sum(-1) / torch.linalg.vector_norm(to_target, dim=-1)
        return up, heading, angle

    def observe(self, state: State) -> Tensor:
        """Height 1, velocity in the body's frame 3, angular velocity 3, yaw, roll, angle to target, up, heading, joints
        8, 0.1 speeds 8, 0.1 feet forces and torques 24, actions 8.
        """
        qpos, qvel = state.fields["qpos"], state.fields["qvel"]
        quat = qpos[:, 3:7]
        scaled, speeds = self._joints(state)
        up, heading, angle = self._projections(state)
        turn = yaw(quat)
        single = torch.stack((turn, roll(quat), angle - turn, up, heading), -1)
        feet = 0.1 * state.fields["sensordata"][:, self.feet]
        velocity = rotate_back(quat, qvel[:, :3])
        parts = (
            qpos[:, 2:3],
            velocity,
            qvel[:, 3:6],
            single,
            scaled,
            0.2 * speeds,
            feet,
            state.actions,
        )
        return torch.cat(parts, -1)

    def outcome(self, state: State) -> Outcome:
        """Progress and posture, less effort; ends when it falls."""
        qpos = state.fields["qpos"]
        scaled, speeds = self._joints(state)
        up, heading, _ = self._projections(state)
        progress = (state.memory["distance"] - self._distance(qpos)) / self.dt
        heading_reward = torch.where(heading > 0.8, 0.5, 0.5 * heading / 0.8)
        effort = 0.005 * state.actions.square().sum(-1) + 0.05 * (state.actions * 0.2 * speeds).abs().sum(-1)
        at_limit = 0.1 * (scaled > 0.99).sum(-1)
        rewards = progress + 0.5 + 0.1 * (up > 0.93) + heading_reward - effort - at_limit
        fallen = qpos[:, 2] < 0.31
        return Outcome(torch.where(fallen, -1.0, rewards), fallen)
