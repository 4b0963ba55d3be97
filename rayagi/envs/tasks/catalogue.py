"""Registered tasks by id, and construction of a task from its id and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rayagi.envs.errors import EnvironmentOptionError, TaskError
from rayagi.envs.providers import check_options
from rayagi.envs.tasks.anymal import Anymal
from rayagi.envs.tasks.ball_balance import BallBalance
from rayagi.envs.tasks.franka_cabinet import FrankaCabinet
from rayagi.envs.tasks.locomotion import Ant, Humanoid
from rayagi.envs.tasks.randomisation import check_randomize
from rayagi.envs.tasks.shadow_hand import ShadowHand
from rayagi.envs.tasks.task import Task
from rayagi.envs.user_class import user_class

TASKS: Mapping[str, type[Task]] = {
    "rayagi/Ant-v0": Ant,
    "rayagi/Anymal-v0": Anymal,
    "rayagi/BallBalance-v0": BallBalance,
    "rayagi/FrankaCabinet-v0": FrankaCabinet,
    "rayagi/Humanoid-v0": Humanoid,
    "rayagi/ShadowHand-v0": ShadowHand,
}


_KINDS: Mapping[type, tuple[Any, str]] = {float: (float | int, "a number"), str: (str, "text")}
"""Accepted types of an option, by the type of its default."""


def find(env_id: str) -> type[Task] | None:
    """The task class of an id, from the catalogue or a user's ``module:Class``; None if it names no task.

    Raises:
        EnvironmentOptionError: it names a module that cannot be imported.
    """
    return TASKS.get(env_id) or user_class(env_id, Task)


def task_class_of(env_id: str) -> type[Task]:
    """The task class of an id for which ``find`` returns one."""
    found = find(env_id)
    assert found is not None
    return found


def make_task(env_id: str, options: Mapping[str, Any]) -> Task:
    """Construct a task with its options.

    Raises:
        EnvironmentOptionError: an unknown option or an invalid value.
        TaskError: the class lacks a method.
    """
    task_class = task_class_of(env_id)
    missing = sorted(getattr(task_class, "__abstractmethods__", ()))
    if missing:
        raise TaskError(env_id, f"the class {task_class.__name__} lacks the method {', '.join(missing)}")
    check_options(env_id, task_class, options)
    for field in fields(task_class):
        kinds, name = _KINDS.get(type(field.default), (object, ""))
        value = options.get(field.name, field.default)
        if not isinstance(value, kinds):
            raise EnvironmentOptionError(env_id, f"{field.name} is {value!r}; it must be {name}")
    check_randomize(env_id, options.get("randomize", {}))
    task = task_class(**options)
    if task.xml_file:
        task.load()  # reports missing parts of the user's model before anything starts
    return task
