"""Robots rewarded for moving forward: Ant, HalfCheetah, Hopper, Walker2d, Swimmer (v5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayagi.envs.mujoco_cpu.physics import Array, BoolArray, Fields
from rayagi.envs.mujoco_cpu.task import (
    CompiledModel,
    GymnasiumTask,
    gaussian_speed_start,
    sum_of_squares,
    uniform_start,
)


@dataclass(frozen=True, kw_only=True)
class GymnasiumAnt(GymnasiumTask):
    """Four legs, eight torques, contact forces in the observation."""

    xml_file: str = "ant.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    healthy_reward: float = 1.0
    main_body: int | str = 1
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    derived_fields: ClassVar[tuple[str, ...]] = ("xpos", "cfrc_ext")
    description: ClassVar[str] = "a four-legged robot runs forward"

    def forward_position(self, compiled: CompiledModel, fields: Fields) -> Array:
        """The main body's x."""
        return fields["xpos"][:, compiled.body(self.main_body), 0]

    def _contact_forces(self, fields: Fields) -> Array:
        low, high = self.contact_force_range
        return np.minimum(np.maximum(fields["cfrc_ext"], low), high)

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions, velocities, clipped contact forces on every body but the world."""
        parts = [fields["qpos"][:, 2 * self.exclude_current_positions_from_observation :], fields["qvel"]]
        if self.include_cfrc_ext_in_observation:
            parts.append(self._contact_forces(fields)[:, 1:].reshape(len(parts[0]), -1))
        return np.concatenate(parts, axis=1)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Speed and survival, less control and contact costs; ends when it falls or jumps too high."""
        low, high = self.healthy_z_range
        z = fields["qpos"][:, 2]
        # Gymnasium also checks that the state is finite; here the engine ends episodes of unstable worlds.
        healthy = (low <= z) & (z <= high)
        costs = self.ctrl_cost_weight * sum_of_squares(actions)
        costs += self.contact_cost_weight * sum_of_squares(self._contact_forces(fields))
        rewards = speed * self.forward_reward_weight + healthy * self.healthy_reward - costs
        return rewards, ~healthy & self.terminate_when_unhealthy

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around the model's pose."""
        return gaussian_speed_start(compiled, rng, self.reset_noise_scale)


@dataclass(frozen=True, kw_only=True)
class HalfCheetah(GymnasiumTask):
    """Two legs in a plane, six torques, never falls."""

    xml_file: str = "half_cheetah.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 0.1
    exclude_current_positions_from_observation: bool = True

    description: ClassVar[str] = "a two-legged planar robot runs forward"

    def forward_position(self, compiled: CompiledModel, fields: Fields) -> Array:
        """The root's x."""
        return fields["qpos"][:, 0]

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions and velocities."""
        skip = int(self.exclude_current_positions_from_observation)
        return np.concatenate((fields["qpos"][:, skip:], fields["qvel"]), axis=1)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Speed less control cost; never ends."""
        rewards = self.forward_reward_weight * speed - self.ctrl_cost_weight * sum_of_squares(actions)
        return rewards, np.zeros(len(speed), dtype=bool)

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around the model's pose."""
        return gaussian_speed_start(compiled, rng, self.reset_noise_scale)


@dataclass(frozen=True, kw_only=True)
class Swimmer(HalfCheetah):
    """Three links in a viscous fluid."""

    xml_file: str = "swimmer.xml"
    frame_skip: int = 4
    ctrl_cost_weight: float = 1e-4

    description: ClassVar[str] = "a three-link robot swims forward"

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions and velocities."""
        skip = 2 * self.exclude_current_positions_from_observation
        return np.concatenate((fields["qpos"][:, skip:], fields["qvel"]), axis=1)

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around the model's pose."""
        return uniform_start(compiled, rng, self.reset_noise_scale)


@dataclass(frozen=True, kw_only=True)
class Walker2d(GymnasiumTask):
    """Two legs in a plane that must stay upright."""

    xml_file: str = "walker2d_v5.xml"
    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 1e-3
    healthy_reward: float = 1.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)
    reset_noise_scale: float = 5e-3
    exclude_current_positions_from_observation: bool = True

    description: ClassVar[str] = "a two-legged planar robot walks forward without falling"

    def forward_position(self, compiled: CompiledModel, fields: Fields) -> Array:
        """The root's x."""
        return fields["qpos"][:, 0]

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions, and velocities clipped to 10."""
        skip = int(self.exclude_current_positions_from_observation)
        return np.concatenate((fields["qpos"][:, skip:], np.clip(fields["qvel"], -10, 10)), axis=1)

    def _healthy(self, fields: Fields) -> BoolArray:
        z, angle = fields["qpos"][:, 1], fields["qpos"][:, 2]
        return _inside(z, self.healthy_z_range) & _inside(angle, self.healthy_angle_range)

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Speed and survival, less control cost; ends when it falls."""
        healthy = self._healthy(fields)
        rewards = self.forward_reward_weight * speed + healthy * self.healthy_reward
        return rewards - self.ctrl_cost_weight * sum_of_squares(
            actions
        ), ~healthy & self.terminate_when_unhealthy

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around the model's pose."""
        return uniform_start(compiled, rng, self.reset_noise_scale)


@dataclass(frozen=True, kw_only=True)
class Hopper(Walker2d):
    """One leg in a plane."""

    xml_file: str = "hopper.xml"
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)
    healthy_z_range: tuple[float, float] = (0.7, float("inf"))
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)

    description: ClassVar[str] = "a one-legged planar robot hops forward without falling"

    def _healthy(self, fields: Fields) -> BoolArray:
        state = np.concatenate((fields["qpos"][:, 2:], fields["qvel"]), axis=1)
        return _inside(state, self.healthy_state_range).all(axis=1) & super()._healthy(fields)


def _inside(values: Array, limits: tuple[float, float]) -> BoolArray:
    """Whether values are strictly between the limits, as in Gymnasium's planar walkers."""
    return (limits[0] < values) & (values < limits[1])
