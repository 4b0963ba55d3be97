"""EnvProvider of tasks: rayagi's six and users' own, on the engines mujoco_cpu and mujoco_warp."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch

from actors.protocols import EnvInfo
from rayagi.envs.errors import TaskError
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.providers import EnvProvider, VecEnvArgs, check_options, time_limit, user_class
from rayagi.envs.tasks.anymal import Anymal
from rayagi.envs.tasks.ball_balance import BallBalance
from rayagi.envs.tasks.compiled.program import RULES, compile_task
from rayagi.envs.tasks.compiled.tensors import UntraceableError
from rayagi.envs.tasks.compiled.trace import trace_task
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.engines import make_batched_sim
from rayagi.envs.tasks.franka_cabinet import FrankaCabinet
from rayagi.envs.tasks.locomotion import Ant, Humanoid
from rayagi.envs.tasks.masked import MaskedBatchedSim, MaskedTaskVecEnv
from rayagi.envs.tasks.randomisation import check_randomize
from rayagi.envs.tasks.shadow_hand import ShadowHand
from rayagi.envs.tasks.task import Task
from rayagi.envs.tasks.validation import validate_task
from rayagi.envs.tasks.vec_env import TaskVecEnv, describe

TASKS: Mapping[str, type[Task]] = {
    "rayagi/Ant-v0": Ant,
    "rayagi/Anymal-v0": Anymal,
    "rayagi/BallBalance-v0": BallBalance,
    "rayagi/FrankaCabinet-v0": FrankaCabinet,
    "rayagi/Humanoid-v0": Humanoid,
    "rayagi/ShadowHand-v0": ShadowHand,
}


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
    check_randomize(env_id, options.get("randomize", {}))
    task = task_class(**options)
    if task.xml_file:
        task.load()  # reports missing parts of the user's model before anything starts
    return task


_logger = logging.getLogger("rayagi.envs.tasks")


class OwnTaskProvider(EnvProvider):
    """Registered tasks, and users' classes."""

    catalogue = TASKS
    find = staticmethod(find)

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Construct the task. A user's own is also validated, and a warning is logged if it cannot be compiled."""
        task = make_task(env_id, options_of(env_id, kwargs)[1])
        if env_id in TASKS:
            return
        rules, fields = validate_task(env_id, task)
        try:
            trace_task(rules, fields)
        except UntraceableError as error:
            _warn_once(f"{RULES.without.format(env_id)}, since they cannot be compiled: {error}")

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """From the task's declaration. Raises EnvError for an unsuitable ``xml_file``."""
        limit, options = options_of(env_id, kwargs)
        task = make_task(env_id, options)
        if task.xml_file:
            task.rules(task.load(), device=torch.device("cpu"), dtype=torch.float64)
        return describe(env_id, engine, task, limit)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> TaskVecEnv:
        """VecEnv of the task on an engine: masked on mujoco_warp, compiled on mujoco_cpu, else on torch."""
        limit, options = options_of(env_id, kwargs)
        task = make_task(env_id, options)
        model = task.load()
        worlds = make_batched_sim(engine, task, model, env_args)
        info = describe(env_id, engine, task, limit)
        rules = task.rules(model, device=worlds.device, dtype=worlds.dtype)
        first, seed = env_args.first_env_index, env_args.seed
        if isinstance(worlds, MaskedBatchedSim):
            return MaskedTaskVecEnv(info, rules, worlds, first_env_index=first, seed=seed)
        if isinstance(worlds, CpuBatchedSim):
            compile_them = partial(compile_task, rules, worlds.fields)
            # If the functions cannot be compiled, check() has logged a warning.
            program = RULES.made_or_none(compile_them, whose=env_id, unfit=(UntraceableError,))
            if program is not None:
                return CompiledTaskVecEnv(info, rules, worlds, program, first_env_index=first, seed=seed)
        return TaskVecEnv(info, rules, worlds, first_env_index=first, seed=seed)


def options_of(env_id: str, kwargs: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The time limit (the option's or the task's default), and the task's own options."""
    return time_limit(env_id, kwargs, task_class_of(env_id).max_episode_steps)


@cache
def _warn_once(text: str) -> None:
    _logger.warning(text)
