"""EnvProvider of tasks: rayagi's six and users' own, on the engines mujoco_cpu and mujoco_warp."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import mujoco
import torch

from actors.protocols import EnvInfo
from placement.inventory.limits import available_bytes
from rayagi.envs.errors import MemoryShortError, TaskError
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim, bytes_per_world
from rayagi.envs.providers import EnvProvider, VecEnvArgs, check_options, time_limit
from rayagi.envs.tasks.anymal import Anymal
from rayagi.envs.tasks.ball_balance import BallBalance
from rayagi.envs.tasks.compiled.program import RULES, compile_task
from rayagi.envs.tasks.compiled.tensors import UntraceableError
from rayagi.envs.tasks.compiled.trace import trace_task
from rayagi.envs.tasks.compiled.vec_env import CompiledTaskVecEnv
from rayagi.envs.tasks.franka_cabinet import FrankaCabinet
from rayagi.envs.tasks.locomotion import Ant, Humanoid
from rayagi.envs.tasks.masked import MaskedBatchedSim, MaskedTaskVecEnv
from rayagi.envs.tasks.randomisation import check_randomize, drawn_factors, varied_fields
from rayagi.envs.tasks.shadow_hand import ShadowHand
from rayagi.envs.tasks.task import Task
from rayagi.envs.tasks.validation import validate_task
from rayagi.envs.tasks.vec_env import BatchedSim, TaskVecEnv, describe

TASKS: Mapping[str, type[Task]] = {
    "rayagi/Ant-v0": Ant,
    "rayagi/Anymal-v0": Anymal,
    "rayagi/BallBalance-v0": BallBalance,
    "rayagi/FrankaCabinet-v0": FrankaCabinet,
    "rayagi/Humanoid-v0": Humanoid,
    "rayagi/ShadowHand-v0": ShadowHand,
}


def make_task(env_id: str, options: Mapping[str, Any]) -> Task:
    """Construct a task with its options.

    Raises:
        EnvironmentOptionError: an unknown option or an invalid value.
        TaskError: the class lacks a method.
    """
    task_class = OwnTaskProvider.find(env_id)
    assert task_class is not None
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
    base = Task

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
    task_class = OwnTaskProvider.find(env_id)
    assert task_class is not None
    return time_limit(env_id, kwargs, task_class.max_episode_steps)


@cache
def _warn_once(text: str) -> None:
    _logger.warning(text)


def make_batched_sim(engine: str, task: Task, model: mujoco.MjModel, env_args: VecEnvArgs) -> BatchedSim:
    """Batched simulation of a task's model, with the fields that it reads and its domain randomisation.

    Raises:
        ModelError: the engine does not support a part of the model.
        MemoryShortError: the worlds do not fit into memory.
    """
    num_worlds, names = env_args.num_envs, task.fields
    if engine == "mujoco_cpu":
        check_fits(engine, num_worlds, bytes_per_world(model, names), torch.device("cpu"))
        factors = drawn_factors(task.randomize, env_args.seed, env_args.first_env_index, num_worlds)
        return CpuBatchedSim(model, num_worlds, env_args.num_threads, names, factors)
    # Imported lazily: these packages are an extra, and take a second to import.
    from rayagi.envs.mujoco_warp import capacity
    from rayagi.envs.mujoco_warp.batched_sim import WarpBatchedSim

    device, limits = warp_device(), capacity.measured(task, model)
    check_fits(engine, num_worlds, capacity.bytes_per_world(model, limits), device)
    factors = drawn_factors(task.randomize, env_args.seed, env_args.first_env_index, num_worlds)
    return WarpBatchedSim(model, num_worlds, names, device, limits, varied_fields(model, factors))


def warp_device() -> torch.device:
    """The first visible GPU, which in a GMI is its slice; the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_fits(engine: str, num_worlds: int, bytes_per_world: int, device: torch.device) -> None:
    """Compare the worlds' memory with the free memory of their device. Raises MemoryShortError: they do not fit."""
    free = free_bytes(device)
    if num_worlds * bytes_per_world > free:
        raise MemoryShortError(engine, num_worlds, bytes_per_world, free, str(device))


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or available memory of the host. [unverified on GPU]"""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
