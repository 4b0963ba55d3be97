"""Gymnasium's MuJoCo v5 tasks, as pure functions of MuJoCo fields of N environments.

Robots that move forward, humanoids, carts that balance, arms that reach or push.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import gymnasium
import mujoco
import numpy as np

from actors.protocols import ActionSpec, EnvInfo
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics
from rayagi.envs.mujoco_cpu.physics import Array, BatchPhysics, BoolArray, Fields, route_warnings_to_logging

_ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


@dataclass(frozen=True)
class CompiledModel:
    """A compiled model and the constants that tasks read from it."""

    model: mujoco.MjModel
    frame_skip: int

    @cached_property
    def dt(self) -> float:
        """Seconds per environment step."""
        return float(self.model.opt.timestep * self.frame_skip)

    @cached_property
    def init_qpos(self) -> Array:
        """Positions that resets add noise to, (nq,)."""
        return np.array(mujoco.MjData(self.model).qpos)

    @cached_property
    def init_qvel(self) -> Array:
        """Velocities that resets add noise to, (nv,)."""
        return np.zeros(self.model.nv)

    @cached_property
    def mass_fractions(self) -> Array:
        """Each body's share of the total mass, (nbody,)."""
        mass = np.array(self.model.body_mass)
        return mass / mass.sum()

    def body(self, body: str | int) -> int:
        """A body's index."""
        return int(self.model.body(body).id)


@dataclass(frozen=True, kw_only=True)
class GymnasiumTask(ABC):
    """One of Gymnasium's MuJoCo v5 tasks; its fields are that environment's constructor arguments.

    Methods take ``fields`` of N environments, (N, ...) each, and return (N, ...).
    """

    xml_file: str = ""
    frame_skip: int = 1

    derived_fields: ClassVar[tuple[str, ...]] = ()
    """MjData fields that the task reads beside qpos and qvel."""
    description: ClassVar[str] = ""

    @property
    def needs_contact_forces(self) -> bool:
        """Whether the task reads cfrc_ext."""
        return "cfrc_ext" in self.derived_fields

    def load(self) -> CompiledModel:
        """Compile the model. Raises OSError if the file is missing, ValueError if MuJoCo rejects it."""
        given = os.path.expanduser(self.xml_file)  # not Path's: it drops a leading "./"
        path = Path(given) if given.startswith((".", "/")) else _ASSETS / given
        if not path.exists():
            raise FileNotFoundError(f"there is no model file {path}")
        return CompiledModel(mujoco.MjModel.from_xml_path(str(path)), self.frame_skip)

    def forward_position(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Position of the robot along the axis of its speed reward, (N,) metres."""
        return np.zeros(len(fields["qpos"]))

    @abstractmethod
    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Observations, (N, obs_dim)."""

    @abstractmethod
    def reward_and_done(
        self, compiled: CompiledModel, fields: Fields, actions: Array, speed: Array
    ) -> tuple[Array, BoolArray]:
        """Rewards (N,) and terminated (N,) bool. ``speed``: change of ``forward_position``, (N,) m/s."""

    @abstractmethod
    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """A random initial state: qpos (nq,) and qvel (nv,), drawn in Gymnasium's order and distributions."""


def sum_of_squares(values: Array) -> Array:
    """Sum of squares per environment, (N, ...) -> (N,)."""
    flat = values.reshape(len(values), -1)
    return np.einsum("ij,ij->i", flat, flat)


@dataclass(frozen=True, kw_only=True)
class NoisyStartTask(GymnasiumTask):
    """A task whose episodes start with noise of ``reset_noise_scale`` around the model's pose."""

    reset_noise_scale: float = 0.1
    gaussian_speeds: ClassVar[bool] = False
    """Whether the noise of velocities is Gaussian, not uniform as that of positions."""

    def draw_start(self, compiled: CompiledModel, rng: np.random.Generator) -> tuple[Array, Array]:
        """Noise around the model's pose."""
        scale, nv = self.reset_noise_scale, compiled.model.nv
        qpos = compiled.init_qpos + rng.uniform(-scale, scale, compiled.model.nq)
        noise = scale * rng.standard_normal(nv) if self.gaussian_speeds else rng.uniform(-scale, scale, nv)
        return qpos, compiled.init_qvel + noise


ENGINE = "mujoco_cpu"


def load_model(env_id: str, task: GymnasiumTask) -> CompiledModel:
    """Compile the task's model.

    Raises:
        EnvironmentOptionError: the file is missing or invalid, or its model has no actuators, or one without a range.
    """
    route_warnings_to_logging()
    try:
        compiled = task.load()
    except (OSError, ValueError) as error:
        raise EnvironmentOptionError(env_id, f"xml_file {task.xml_file!r}: {error}") from error
    if not compiled.model.nu:
        raise EnvironmentOptionError(
            env_id, f"xml_file {task.xml_file!r}: its model has no actuators, so there is no action to learn"
        )
    low, high = compiled.model.actuator_ctrlrange.T
    if not (low < high).all():
        name = compiled.model.actuator(int(np.argmin(low < high))).name
        reason = f"its actuator {name!r} has no ctrlrange, to which actions are clipped: give it one"
        raise EnvironmentOptionError(env_id, f"xml_file {task.xml_file!r}: {reason}")
    return compiled


def make_physics(
    compiled: CompiledModel, task: GymnasiumTask, num_envs: int, num_threads: int
) -> BatchPhysics | ContactPhysics:
    """The fastest physics that computes the fields which the task reads."""
    names = ("qpos", "qvel", *task.derived_fields)
    kind = ContactPhysics if task.needs_contact_forces else BatchPhysics
    return kind(compiled.model, num_envs, num_threads, names)


def describe(
    env_id: str, compiled: CompiledModel, task: GymnasiumTask, max_episode_steps: int | None
) -> EnvInfo:
    """The EnvInfo of a task. Raises EnvironmentOptionError: its model has other parts than it reads."""
    physics = make_physics(compiled, task, 1, 1)
    try:
        obs_dim = task.observe(compiled, physics.fields).shape[1]
        speed = task.forward_position(compiled, physics.fields)
        task.reward_and_done(compiled, physics.fields, np.zeros((1, compiled.model.nu)), speed)
        task.draw_start(compiled, np.random.default_rng(0))
    except (LookupError, ValueError) as error:
        first_line = (str(error).strip("\"'").splitlines() or [""])[0]
        reason = f"xml_file {task.xml_file!r} has not the parts that the task reads ({first_line})"
        raise EnvironmentOptionError(env_id, reason) from error
    finally:
        physics.close()
    # Gymnasium's action space holds the model's range in float32.
    low, high = compiled.model.actuator_ctrlrange.astype(np.float32).T.tolist()
    action = ActionSpec(kind="continuous", dim=compiled.model.nu, low=tuple(low), high=tuple(high))
    return EnvInfo(
        env_id=env_id, engine=ENGINE, obs_dim=obs_dim, action=action, max_episode_steps=max_episode_steps
    )


@dataclass(frozen=True, kw_only=True)
class GymnasiumAnt(NoisyStartTask):
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
    exclude_current_positions_from_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    derived_fields: ClassVar[tuple[str, ...]] = ("xpos", "cfrc_ext")
    gaussian_speeds: ClassVar[bool] = True
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


@dataclass(frozen=True, kw_only=True)
class HalfCheetah(NoisyStartTask):
    """Two legs in a plane, six torques, never falls."""

    xml_file: str = "half_cheetah.xml"
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.1
    exclude_current_positions_from_observation: bool = True

    gaussian_speeds: ClassVar[bool] = True
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


@dataclass(frozen=True, kw_only=True)
class Swimmer(HalfCheetah):
    """Three links in a viscous fluid."""

    xml_file: str = "swimmer.xml"
    frame_skip: int = 4
    ctrl_cost_weight: float = 1e-4

    gaussian_speeds: ClassVar[bool] = False
    description: ClassVar[str] = "a three-link robot swims forward"

    def observe(self, compiled: CompiledModel, fields: Fields) -> Array:
        """Positions and velocities."""
        skip = 2 * self.exclude_current_positions_from_observation
        return np.concatenate((fields["qpos"][:, skip:], fields["qvel"]), axis=1)


@dataclass(frozen=True, kw_only=True)
class Walker2d(NoisyStartTask):
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


_FREE_JOINT_DOFS = 6


@dataclass(frozen=True, kw_only=True)
class _HumanoidBody(NoisyStartTask):
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


_MAX_ANGLE_RAD = 0.2


@dataclass(frozen=True, kw_only=True)
class InvertedPendulum(NoisyStartTask):
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


@dataclass(frozen=True, kw_only=True)
class InvertedDoublePendulum(NoisyStartTask):
    """Two poles, one on the other, on a cart."""

    xml_file: str = "inverted_double_pendulum.xml"
    frame_skip: int = 5
    healthy_reward: float = 10.0

    derived_fields: ClassVar[tuple[str, ...]] = ("site_xpos", "qfrc_constraint")
    gaussian_speeds: ClassVar[bool] = True
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
