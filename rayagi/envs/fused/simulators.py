"""Fused simulators: Gymnasium's CartPole, Pendulum and Acrobot, and a quadrotor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayagi.envs.fused.ops import clip, cos, exp, sin, where
from rayagi.envs.fused.simulator import Box, Discrete, Scalar, Simulator, between


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
