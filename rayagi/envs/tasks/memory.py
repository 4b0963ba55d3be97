"""Memory check before worlds are allocated."""

from __future__ import annotations

import torch

from placement.inventory.limits import available_bytes
from rayagi.envs.errors import MemoryShortError


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
