"""The tasks by id, and how to make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rayagi.envs.errors import EnvironmentOptionError
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
    "rayagi/ShadowHand-v0": ShadowHand,
    "rayagi/Humanoid-v0": Humanoid,
}


def make_task(env_id: str, options: Mapping[str, Any]) -> Task:
    """The task with its options; EnvironmentOptionError for one that it lacks."""
    task_class = TASKS[env_id]
    known = [field.name for field in fields(task_class)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise EnvironmentOptionError(
            env_id, f"there is no option {', '.join(unknown)}; it has max_episode_steps, {', '.join(known)}"
        )
    frame_skip = options.get("frame_skip", 1)
    if not isinstance(frame_skip, int) or frame_skip < 1:
        raise EnvironmentOptionError(env_id, f"frame_skip is {frame_skip!r}; it must be a positive integer")
    check_randomize(env_id, options.get("randomize", {}))
    return task_class(**options)
