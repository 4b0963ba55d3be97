"""Acrobot: Gymnasium's Acrobot-v1 as a fused simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayagi.envs.fused.ops import clip, cos, sin, where
from rayagi.envs.fused.simulator import Discrete, Scalar, Simulator, between


@dataclass(frozen=True)
class Acrobot(Simulator):
    """Swing up a two-link pendulum with only the middle joint actuated (Sutton 1996): Gymnasium's Acrobot-v1 with the book's
    equations (Sutton, Barto: Reinforcement Learning). Units: rad, s, N m.

    Reward -1 per step, 0 for the step in which the tip passes the line at height 1 m, which terminates.
    """

    gravity: float = 9.8
    dt: float = 0.2

    description = "two links, one joint driven, are swung above a line"
    state = ("theta1", "theta2", "speed1", "speed2")
    actions = Discrete(3)
    max_episode_steps = 500
    num_draws = 4

    def start(self, draws: Sequence[Scalar]) -> Sequence[Scalar]:
        """All four uniform in +-0.1."""
        return [between(draw, -0.1, 0.1) for draw in draws]

    def step(self, s: Any, action: Any) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        """One step of the fourth-order Runge-Kutta method; angles wrapped to [-pi, pi), speeds clipped."""
        after = self._integrated(tuple(s), action - 1.0)
        theta1, theta2 = (_wrapped(angle) for angle in after[:2])
        speed1 = clip(after[2], -4 * math.pi, 4 * math.pi)
        speed2 = clip(after[3], -9 * math.pi, 9 * math.pi)
        reached = -cos(theta1) - cos(theta2 + theta1) > 1.0  # height of the tip, m
        return (theta1, theta2, speed1, speed2), where(reached, 0.0, -1.0), reached

    def observe(self, s: Any) -> Sequence[Scalar]:
        """cos and sin of both angles, both speeds (rad/s)."""
        return cos(s.theta1), sin(s.theta1), cos(s.theta2), sin(s.theta2), s.speed1, s.speed2

    def _integrated(self, y: Sequence[Scalar], torque: Scalar) -> Sequence[Scalar]:
        """y + dt / 6 (k1 + 2 k2 + 2 k3 + k4)."""

        def moved(rates: Sequence[Scalar], dt: float) -> Sequence[Scalar]:
            return [value + dt * rate for value, rate in zip(y, rates, strict=True)]

        k1 = self._rates(y, torque)
        k2 = self._rates(moved(k1, self.dt / 2), torque)
        k3 = self._rates(moved(k2, self.dt / 2), torque)
        k4 = self._rates(moved(k3, self.dt), torque)
        stages = zip(k1, k2, k3, k4, strict=True)
        return moved([a + 2.0 * b + 2.0 * c + d for a, b, c, d in stages], self.dt / 6)

    def _rates(self, y: Sequence[Scalar], torque: Scalar) -> Sequence[Scalar]:
        """Time derivative of the state, by the equations of Sutton and Barto's book.

        Both links: length l = 1 m, mass m = 1 kg, inertia I = 1 kg m2, centre of mass at lc = 0.5 m.
        """
        theta1, theta2, speed1, speed2 = y
        cos2, sin2 = cos(theta2), sin(theta2)
        # d1 = m lc^2 + m (l^2 + lc^2 + 2 l lc cos theta2) + 2 I,  d2 = m (lc^2 + l lc cos theta2) + I
        d1 = 0.25 + (1.0 + 0.25 + cos2) + 2.0
        d2 = 0.25 + 0.5 * cos2 + 1.0
        # phi2 = m lc g cos(theta1 + theta2 - pi/2)
        # phi1 = -m l lc sin theta2 (theta2'^2 + 2 theta1' theta2') + (m lc + m l) g cos(theta1 - pi/2) + phi2
        phi2 = 0.5 * self.gravity * cos(theta1 + theta2 - math.pi / 2)
        phi1 = (
            -0.5 * speed2**2 * sin2
            - speed2 * speed1 * sin2
            + 1.5 * self.gravity * cos(theta1 - math.pi / 2)
            + phi2
        )
        # theta2'' = (torque + d2/d1 phi1 - m l lc theta1'^2 sin theta2 - phi2) / (m lc^2 + I - d2^2/d1)
        # theta1'' = -(d2 theta2'' + phi1) / d1
        acc2 = (torque + d2 / d1 * phi1 - 0.5 * speed1**2 * sin2 - phi2) / (1.25 - d2**2 / d1)
        acc1 = -(d2 * acc2 + phi1) / d1
        return speed1, speed2, acc1, acc2


def _wrapped(angle: Scalar) -> Scalar:
    """The angle modulo 2 pi, in [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi
