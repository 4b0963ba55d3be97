"""Pendulum: Gymnasium's Pendulum-v1 as a fused simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayagi.envs.fused.ops import clip, cos, sin
from rayagi.envs.fused.simulator import Box, Scalar, Simulator, between


@dataclass(frozen=True)
class Pendulum(Simulator):
    """Swing up a rod with a torque-limited motor, as Gymnasium's Pendulum-v1: rad, s, N m; angle 0 is upright.

    Reward -(angle^2 + 0.1 speed^2 + 0.001 torque^2) of the state before the step; never terminates, only truncates.
    """

    gravity: float = 10.0
    mass: float = 1.0
    length: float = 1.0
    max_speed: float = 8.0
    dt: float = 0.05

    description = "a rod is swung up by a weak motor"
    state = ("theta", "theta_dot")
    actions = Box((-2.0,), (2.0,))
    max_episode_steps = 200
    num_draws = 2

    def start(self, draws: Sequence[Scalar]) -> Sequence[Scalar]:
        """Any angle, speed within +-1 rad/s."""
        return between(draws[0], -math.pi, math.pi), between(draws[1], -1.0, 1.0)

    def step(self, s: Any, action: Any) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        """Semi-implicit Euler step of theta'' = 3 g / (2 l) sin theta + 3 / (m l^2) torque."""
        (torque,) = action
        angle = (s.theta + math.pi) % (2 * math.pi) - math.pi
        cost = angle**2 + 0.1 * s.theta_dot**2 + 0.001 * torque**2
        pull = 3 * self.gravity / (2 * self.length) * sin(s.theta)
        speed = s.theta_dot + (pull + 3.0 / (self.mass * self.length**2) * torque) * self.dt
        speed = clip(speed, -self.max_speed, self.max_speed)
        return (s.theta + speed * self.dt, speed), -cost, False

    def observe(self, s: Any) -> Sequence[Scalar]:
        """cos and sin of the angle, speed (rad/s)."""
        return cos(s.theta), sin(s.theta), s.theta_dot
