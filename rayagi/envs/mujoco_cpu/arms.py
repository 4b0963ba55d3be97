"""Arms that reach or push: Reacher and Pusher (v5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayagi.envs.mujoco_cpu.physics import Array, BoolArray, Fields
from rayagi.envs.mujoco_cpu.task import CompiledModel, GymnasiumTask, sum_of_squares

_SPEED_NOISE = 0.005


@dataclass(frozen=True, kw_only=True)
class Reacher(GymnasiumTask):
    """Two links reach a random target."""

    xml_file: str = "reacher.xml"
    frame_skip: int = 2
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 1.0

    derived_fields: ClassVar[tuple[str, ...]] = ("xpos",)
    description: ClassVar[str] = "a two-link arm reaches a target"

    def _to_target(self, compiled: CompiledModel, fields: Fields) -> Array:
        return fields["xpos"][:, compiled.body("fingertip")] - fields["xpos"][:, compiled.body("target")]

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Joint angles as cosine and sine, target, joint speeds, planar vector from target to fingertip."""
        angles = fields["qpos"][:, :2]
        parts = (
            np.cos(angles),
            np.sin(angles),
            fields["qpos"][:, 2:],
            fields["qvel"][:, :2],
            self._to_target(compiled, fields)[:, :2],
        )
        return np.concatenate(parts, axis=1)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Minus distance, minus control; never ends."""
        rewards = -np.sqrt(sum_of_squares(self._to_target(compiled, fields))) * self.reward_dist_weight
        return rewards - sum_of_squares(actions) * self.reward_control_weight, np.zeros(
            len(speed), dtype=bool
        )

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise on the joints; a target within 0.2 m."""
        qpos = rng.uniform(-0.1, 0.1, compiled.model.nq) + compiled.init_qpos
        while True:
            target = rng.uniform(-0.2, 0.2, 2)
            if np.hypot(*target) < 0.2:
                break
        qpos[-2:] = target
        qvel = compiled.init_qvel + rng.uniform(-_SPEED_NOISE, _SPEED_NOISE, compiled.model.nv)
        qvel[-2:] = 0
        return qpos, qvel


@dataclass(frozen=True, kw_only=True)
class Pusher(GymnasiumTask):
    """Seven joints push a cylinder to a goal."""

    xml_file: str = "pusher_v5.xml"
    frame_skip: int = 5
    reward_near_weight: float = 0.5
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 0.1

    derived_fields: ClassVar[tuple[str, ...]] = ("xpos",)
    description: ClassVar[str] = "a seven-joint arm pushes a cylinder to a goal"

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Joint angles and speeds; positions of the arm's tip, the cylinder and the goal."""
        bodies = [compiled.body(name) for name in ("tips_arm", "object", "goal")]
        points = fields["xpos"][:, bodies].reshape(len(fields["qpos"]), -1)
        return np.concatenate((fields["qpos"][:, :7], fields["qvel"][:, :7], points), axis=1)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Minus the distances tip to cylinder and cylinder to goal, minus control; never ends."""
        tip, cylinder, goal = (
            fields["xpos"][:, compiled.body(name)] for name in ("tips_arm", "object", "goal")
        )
        near = np.sqrt(sum_of_squares(cylinder - tip)) * self.reward_near_weight
        away = np.sqrt(sum_of_squares(cylinder - goal)) * self.reward_dist_weight
        rewards = -away - sum_of_squares(actions) * self.reward_control_weight - near
        return rewards, np.zeros(len(speed), dtype=bool)

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """The cylinder anywhere on its half of the table that is not on the goal, which is at the origin."""
        qpos = compiled.init_qpos.copy()
        while True:
            cylinder = np.concatenate((rng.uniform(-0.3, 0, 1), rng.uniform(-0.2, 0.2, 1)))
            if np.hypot(*cylinder) > 0.17:
                break
        qpos[-4:-2] = cylinder
        qpos[-2:] = 0
        qvel = compiled.init_qvel + rng.uniform(-_SPEED_NOISE, _SPEED_NOISE, compiled.model.nv)
        qvel[-4:] = 0
        return qpos, qvel
