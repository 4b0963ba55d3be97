"""CartPole: Gymnasium's CartPole-v1 as a fused simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayagi.envs.fused.ops import cos, sin, where
from rayagi.envs.fused.simulator import Discrete, Scalar, Simulator, between


@dataclass(frozen=True)
class CartPole(Simulator):
    """Balance a pole on a cart that is pushed left or right (Barto, Sutton, Anderson 1983), as in Gymnasium: m, rad, s, N.

    Reward 1 per step, including the last; terminates when the cart leaves +-2.4 m or the pole +-12 degrees.
    """

    gravity: float = 9.8
    cart_mass: float = 1.0
    pole_mass: float = 0.1
    half_length: float = 0.5
    force: float = 10.0
    dt: float = 0.02

    description = "a pole on a cart that is pushed left or right"
    state = ("x", "x_dot", "theta", "theta_dot")
    actions = Discrete(2)
    max_episode_steps = 500
    num_draws = 4

    def start(self, draws: Sequence[Scalar]) -> Sequence[Scalar]:
        """All four uniform in +-0.05."""
        return [between(draw, -0.05, 0.05) for draw in draws]

    def step(self, s: Any, action: Any) -> tuple[Sequence[Scalar], Scalar, Scalar]:
        """Explicit Euler step of the cart-pole equations (M total mass, m pole mass, l half length, F force)."""
        total_mass = self.cart_mass + self.pole_mass
        pole_moment = self.pole_mass * self.half_length
        force = where(action == 1, self.force, -self.force)
        cosine, sine = cos(s.theta), sin(s.theta)
        # push = (F + m l theta'^2 sin theta) / M
        push = (force + pole_moment * s.theta_dot**2 * sine) / total_mass
        # theta'' = (g sin theta - cos theta push) / (l (4/3 - m cos^2 theta / M))
        inertia = self.half_length * (4.0 / 3.0 - self.pole_mass * cosine**2 / total_mass)
        theta_acc = (self.gravity * sine - cosine * push) / inertia
        # x'' = push - m l theta'' cos theta / M
        x_acc = push - pole_moment * theta_acc * cosine / total_mass
        x, theta = s.x + self.dt * s.x_dot, s.theta + self.dt * s.theta_dot
        after = (x, s.x_dot + self.dt * x_acc, theta, s.theta_dot + self.dt * theta_acc)
        return after, 1.0, (abs(x) > 2.4) | (abs(theta) > 12 * 2 * math.pi / 360)
