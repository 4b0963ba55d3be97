"""The tasks by id, and how to make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.families import check_options
from rayagi.envs.tasks.anymal import Anymal
from rayagi.envs.tasks.ball_balance import BallBalance
from rayagi.envs.tasks.franka_cabinet import FrankaCabinet
from rayagi.envs.tasks.locomotion import Ant, Humanoid
from rayagi.envs.tasks.randomisation import check_randomize
from rayagi.envs.tasks.shadow_hand import ShadowHand
from rayagi.envs.tasks.task import Task

TASKS: Mapping[str, type[Task]] = {
    "rayagi/Ant-v0": Ant,
    "rayagi/Anymal-v0": Anymal,
    "rayagi/BallBalance-v0": BallBalance,
    "rayagi/FrankaCabinet-v0": FrankaCabinet,
    "rayagi/Humanoid-v0": Humanoid,
    "rayagi/ShadowHand-v0": ShadowHand,
}


_KINDS: Mapping[type, tuple[Any, str]] = {float: (float | int, "a number"), str: (str, "text")}
"""What an option may be, by the type of its default."""


def make_task(env_id: str, options: Mapping[str, Any]) -> Task:
    """The task with its options; EnvironmentOptionError for one that it lacks."""
    task_class = TASKS[env_id]
    check_options(env_id, task_class, options)
    for field in fields(task_class):
        kinds, name = _KINDS.get(type(field.default), (object, ""))
        value = options.get(field.name, field.default)
        if not isinstance(value, kinds):
            raise EnvironmentOptionError(env_id, f"{field.name} is {value!r}; it must be {name}")
    check_randomize(env_id, options.get("randomize", {}))
    task = task_class(**options)
    if task.xml_file:
        task.load()  # what a user's model lacks is said before anything starts
    return task
