"""Humanoid and HumanoidStandup (v5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayagi.envs.mujoco_cpu.physics import Array, BoolArray, Fields
from rayagi.envs.mujoco_cpu.task import CompiledModel, GymnasiumTask, sum_of_squares, uniform_start

_FREE_JOINT_DOFS = 6


@dataclass(frozen=True, kw_only=True)
class _HumanoidBody(GymnasiumTask):
    """What both tasks share: observation and initial state."""

    frame_skip: int = 5
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 1e-2
    exclude_current_positions_from_observation: bool = True
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    derived_fields: ClassVar[tuple[str, ...]] = ("cinert", "cvel", "qfrc_actuator", "cfrc_ext")

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions, velocities, and per body inertia, velocity and contact forces; actuator forces."""
        rows = len(fields["qpos"])
        parts = [fields["qpos"][:, 2 * self.exclude_current_positions_from_observation :], fields["qvel"]]
        if self.include_cinert_in_observation:
            parts.append(fields["cinert"][:, 1:].reshape(rows, -1))
        if self.include_cvel_in_observation:
            parts.append(fields["cvel"][:, 1:].reshape(rows, -1))
        if self.include_qfrc_actuator_in_observation:
            parts.append(fields["qfrc_actuator"][:, _FREE_JOINT_DOFS:])
        if self.include_cfrc_ext_in_observation:
            parts.append(fields["cfrc_ext"][:, 1:].reshape(rows, -1))
        return np.concatenate(parts, axis=1)

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around the model's pose."""
        return uniform_start(compiled, rng, self.reset_noise_scale)


@dataclass(frozen=True, kw_only=True)
class GymnasiumHumanoid(_HumanoidBody):
    """A humanoid rewarded for running forward upright."""

    xml_file: str = "humanoid.xml"
    forward_reward_weight: float = 1.25
    contact_cost_weight: float = 5e-7
    contact_cost_range: tuple[float, float] = (-np.inf, 10.0)
    healthy_reward: float = 5.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (1.0, 2.0)

    derived_fields: ClassVar[tuple[str, ...]] = (*_HumanoidBody.derived_fields, "xipos")
    description: ClassVar[str] = "a humanoid runs forward without falling"

    def forward_position(self, compiled: CompiledModel, fields: Fields) -> Array:
        """The centre of mass's x."""
        return fields["xipos"][:, :, 0] @ compiled.mass_fractions

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Speed and survival, less control and contact costs; ends when it falls."""
        low, high = self.healthy_z_range
        z = fields["qpos"][:, 2]
        healthy = (low < z) & (z < high)
        contact_cost = self.contact_cost_weight * sum_of_squares(fields["cfrc_ext"])
        costs = self.ctrl_cost_weight * sum_of_squares(actions) + np.clip(
            contact_cost, *self.contact_cost_range
        )
        rewards = self.forward_reward_weight * speed + healthy * self.healthy_reward - costs
        return rewards, ~healthy & self.terminate_when_unhealthy


@dataclass(frozen=True, kw_only=True)
class HumanoidStandup(_HumanoidBody):
    """A humanoid rewarded for raising its torso off the ground."""

    xml_file: str = "humanoidstandup.xml"
    uph_cost_weight: float = 1.0
    """Accepted and without effect, as in Gymnasium."""
    impact_cost_weight: float = 0.5e-6
    impact_cost_range: tuple[float, float] = (-np.inf, 10.0)

    description: ClassVar[str] = "a humanoid stands up from lying"

    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Height, less control and impact costs; never ends."""
        height = fields["qpos"][:, 2] / compiled.model.opt.timestep
        impact_cost = self.impact_cost_weight * sum_of_squares(fields["cfrc_ext"])
        costs = self.ctrl_cost_weight * sum_of_squares(actions) + np.clip(
            impact_cost, *self.impact_cost_range
        )
        return height - costs + 1, np.zeros(len(speed), dtype=bool)
