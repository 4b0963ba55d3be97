"""Compiles a task's MuJoCo model, and describes its environment. Does not import torch, which planning does not need."""

from __future__ import annotations

import numpy as np

from actors.protocols import ActionSpec, EnvInfo
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.mujoco_cpu.contact_physics import ContactPhysics
from rayagi.envs.mujoco_cpu.physics import BatchPhysics, Physics, route_warnings_to_logging
from rayagi.envs.mujoco_cpu.task import CompiledModel, GymnasiumTask

ENGINE = "mujoco_cpu"


def load_model(env_id: str, task: GymnasiumTask) -> CompiledModel:
    """Compile the task's model. Raises EnvironmentOptionError if the file is missing or invalid."""
    route_warnings_to_logging()
    try:
        return task.load()
    except (OSError, ValueError) as error:
        raise EnvironmentOptionError(env_id, f"xml_file {task.xml_file!r}: {error}") from error


def make_physics(compiled: CompiledModel, task: GymnasiumTask, num_envs: int, num_threads: int) -> Physics:
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
