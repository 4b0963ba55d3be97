"""Whether so many worlds fit, said before memory is taken."""

from __future__ import annotations

import torch

from placement.inventory.limits import available_bytes
from rayagi.envs.errors import MemoryShortError


def check_fits(engine: str, num_worlds: int, bytes_per_world: int, device: torch.device) -> None:
    """Compare what worlds will take with what is free on their device.

    Raises:
        MemoryShortError: it is not enough.
    """
    free = free_bytes(device)
    if num_worlds * bytes_per_world > free:
        raise MemoryShortError(engine, num_worlds, bytes_per_world, free, str(device))


def free_bytes(device: torch.device) -> int:
    """Memory that may still be taken, on a GPU or on the host. [unverified on GPU]"""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
