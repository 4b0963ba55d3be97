"""A task on both engines from the same states: shared by the tests of mujoco_warp."""

from __future__ import annotations

from typing import Any

import torch

from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks.masked import MaskedTaskVecEnv
from rayagi.envs.tasks.provider import TASKS, make_batched_sim, make_task
from rayagi.envs.tasks.vec_env import TaskVecEnv, describe


def make_env(env_id: str, engine: str, num_envs: int, *, first=0, seed=3, **options) -> Any:
    """Environments of a task's shipped model."""
    task = make_task(env_id, options)
    model = task.load()
    worlds = make_batched_sim(engine, task, model, VecEnvArgs(num_envs, first, seed, 1))
    rules = task.rules(model, device=worlds.device, dtype=worlds.dtype)
    info = describe(env_id, engine, task, TASKS[env_id].max_episode_steps)
    kind = MaskedTaskVecEnv if engine == "mujoco_warp" else TaskVecEnv
    return kind(info, rules, worlds, first_env_index=first, seed=seed)


def same_state(source: TaskVecEnv, target: TaskVecEnv) -> None:
    """Copy the state of ``source`` to ``target``, in its real type."""
    dtype = target._worlds.dtype

    def converted(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    state = source.state_dict()
    state |= {name: converted(state[name]) for name in ("actions", "obs")}
    state["memory"] = {name: converted(value) for name, value in state["memory"].items()}
    target.load_state_dict(state)
