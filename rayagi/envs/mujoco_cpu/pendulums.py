"""Carts that balance: InvertedPendulum and InvertedDoublePendulum (v5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayagi.envs.mujoco_cpu.physics import Array, BoolArray, Fields
from rayagi.envs.mujoco_cpu.task import CompiledModel, GymnasiumTask, gaussian_speed_start, uniform_start

_MAX_ANGLE_RAD = 0.2


@dataclass(frozen=True, kw_only=True)
class InvertedPendulum(GymnasiumTask):
    """One pole on a cart."""

    xml_file: str = "inverted_pendulum.xml"
    frame_skip: int = 2
    reset_noise_scale: float = 0.01

    description: ClassVar[str] = "a cart balances a pole"

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions and velocities."""
        return np.concatenate((fields["qpos"], fields["qvel"]), axis=1)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """One for every step upright; ends when the pole leans."""
        # Gymnasium also checks that the state is finite; here the engine ends episodes of unstable worlds.
        terminated = np.abs(fields["qpos"][:, 1]) > _MAX_ANGLE_RAD
        return (~terminated).astype(np.float64), terminated

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around upright."""
        return uniform_start(compiled, rng, self.reset_noise_scale)


@dataclass(frozen=True, kw_only=True)
class InvertedDoublePendulum(GymnasiumTask):
    """Two poles, one on the other, on a cart."""

    xml_file: str = "inverted_double_pendulum.xml"
    frame_skip: int = 5
    healthy_reward: float = 10.0
    reset_noise_scale: float = 0.1

    derived_fields: ClassVar[tuple[str, ...]] = ("site_xpos", "qfrc_constraint")
    description: ClassVar[str] = "a cart balances two poles"

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Cart position, angles as sine and cosine, clipped velocities, clipped force on the cart's rail."""
        qpos = fields["qpos"]
        parts = (
            qpos[:, :1],
            np.sin(qpos[:, 1:]),
            np.cos(qpos[:, 1:]),
            np.clip(fields["qvel"], -10, 10),
            np.clip(fields["qfrc_constraint"][:, :1], -10, 10),
        )
        return np.concatenate(parts, axis=1)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Survival, less distance from upright and speed; ends when the tip sinks to 1 m."""
        x, y = fields["site_xpos"][:, 0, 0], fields["site_xpos"][:, 0, 2]
        v1, v2 = fields["qvel"][:, 1], fields["qvel"][:, 2]
        terminated = y <= 1
        distance_penalty = 0.01 * x**2 + (y - 2) ** 2
        speed_penalty = 1e-3 * v1**2 + 5e-3 * v2**2
        return self.healthy_reward * ~terminated - distance_penalty - speed_penalty, terminated

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around upright."""
        return gaussian_speed_start(compiled, rng, self.reset_noise_scale)
