"""Planar quadrotor: fly to the origin and hover there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayagi.envs.fused.ops import cos, exp, sin, where
from rayagi.envs.fused.simulator import Box, Scalar, Simulator, between


@dataclass(frozen=True)
class Quadrotor(Simulator):
    """Two rotors on a beam, in a vertical plane (Tedrake: Underactuated Robotics, chapter 3): m, rad, s, N.

    An action sets a rotor's thrust: 0 at -1, the hovering thrust m g / 2 at 0, twice that at 1. With d the distance from the
    origin, the reward is exp(-d^2) - 0.1 tilt^2 - 0.01 (x'^2 + z'^2 + 0.1 tilt'^2) - 0.01 sum a^2. Terminates with a further
    -5 when d > 3 m or |tilt| > pi / 2.
    """

    mass: float = 0.5
    arm: float = 0.2
    inertia: float = 0.01
    gravity: float = 9.81
    dt: float = 0.02

    description = "two rotors on a beam fly to a point and hover, in a plane"
    state = ("x", "z", "tilt", "x_dot", "z_dot", "tilt_dot")
    actions = Box((-1.0, -1.0), (1.0, 1.0))
    max_episode_steps = 250
    num_draws = 6

    def start(self, draws: Sequence[Scalar]) -> Sequence[Scalar]:
        """Within 1 m, 0.5 rad, 0.5 m/s and 0.5 rad/s."""
        ranges = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5)
        return [between(draw, -most, most) for draw, most in zip(draws, ranges, strict=True)]

    def step(self, s: Any, action: Any) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        """Semi-implicit Euler step.

        m x'' = -(u1 + u2) sin tilt,  m z'' = (u1 + u2) cos tilt - m g,  I tilt'' = arm (u2 - u1)
        """
        left, right = (0.5 * self.mass * self.gravity * (1.0 + one) for one in action)  # u1, u2
        lift = (left + right) / self.mass
        x_dot = s.x_dot - self.dt * lift * sin(s.tilt)
        z_dot = s.z_dot + self.dt * (lift * cos(s.tilt) - self.gravity)
        tilt_dot = s.tilt_dot + self.dt * self.arm * (right - left) / self.inertia
        x, z, tilt = s.x + self.dt * x_dot, s.z + self.dt * z_dot, s.tilt + self.dt * tilt_dot
        distance2 = x**2 + z**2
        lost = (distance2 > 9.0) | (abs(tilt) > math.pi / 2)
        effort = action[0] ** 2 + action[1] ** 2
        speeds = x_dot**2 + z_dot**2 + 0.1 * tilt_dot**2
        reward = exp(-distance2) - 0.1 * tilt**2 - 0.01 * speeds - 0.01 * effort - where(lost, 5.0, 0.0)
        return (x, z, tilt, x_dot, z_dot, tilt_dot), reward, lost
