"""Task: observation, reward, termination and initial state as pure functions of MuJoCo fields of N environments."""

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
    """Compile the task's model. Raises EnvironmentOptionError if the file is missing or invalid."""
    route_warnings_to_logging()
    try:
        return task.load()
    except (OSError, ValueError) as error:
        raise EnvironmentOptionError(env_id, f"xml_file {task.xml_file!r}: {error}") from error


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
    """The EnvInfo of a task."""
    physics = make_physics(compiled, task, 1, 1)
    obs_dim = task.observe(compiled, physics.fields).shape[1]
    physics.close()
    # Gymnasium's action space holds the model's range in float32.
    low, high = compiled.model.actuator_ctrlrange.astype(np.float32).T.tolist()
    action = ActionSpec(kind="continuous", dim=compiled.model.nu, low=tuple(low), high=tuple(high))
    return EnvInfo(
        env_id=env_id, engine=ENGINE, obs_dim=obs_dim, action=action, max_episode_steps=max_episode_steps
    )
