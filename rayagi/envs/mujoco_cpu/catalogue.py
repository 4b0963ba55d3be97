"""This engine's tasks by Gymnasium id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayagi.envs.mujoco_cpu.arms import Pusher, Reacher
from rayagi.envs.mujoco_cpu.humanoids import Humanoid, HumanoidStandup
from rayagi.envs.mujoco_cpu.pendulums import InvertedDoublePendulum, InvertedPendulum
from rayagi.envs.mujoco_cpu.task import Task
from rayagi.envs.mujoco_cpu.walkers import Ant, HalfCheetah, Hopper, Swimmer, Walker2d
from rayagi.envs.providers import check_options

TASKS: Mapping[str, type[Task]] = {
    "Ant-v5": Ant,
    "HalfCheetah-v5": HalfCheetah,
    "Hopper-v5": Hopper,
    "Humanoid-v5": Humanoid,
    "HumanoidStandup-v5": HumanoidStandup,
    "InvertedDoublePendulum-v5": InvertedDoublePendulum,
    "InvertedPendulum-v5": InvertedPendulum,
    "Pusher-v5": Pusher,
    "Reacher-v5": Reacher,
    "Swimmer-v5": Swimmer,
    "Walker2d-v5": Walker2d,
}


def make_task(env_id: str, options: Mapping[str, Any]) -> Task:
    """Make a task from Gymnasium's constructor arguments. Raises EnvironmentOptionError for an unknown one."""
    task_class = TASKS[env_id]
    check_options(env_id, task_class, options)
    # Configuration files give lists where Gymnasium's signatures have tuples.
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return task_class(**values)
