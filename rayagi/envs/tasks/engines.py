"""Engines that run tasks, and the construction of their batched simulations."""

from __future__ import annotations

import mujoco
import torch

from placement.inventory.limits import available_bytes
from rayagi.envs.errors import MemoryShortError
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim, bytes_per_world
from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks.batched_sim import BatchedSim
from rayagi.envs.tasks.randomisation import drawn_factors, varied_fields
from rayagi.envs.tasks.task import Task


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
    """Compare the worlds' memory with the free memory of their device.

    Raises:
        MemoryShortError: they do not fit.
    """
    free = free_bytes(device)
    if num_worlds * bytes_per_world > free:
        raise MemoryShortError(engine, num_worlds, bytes_per_world, free, str(device))


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or available memory of the host. [unverified on GPU]"""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
