"""Memory of this process that CUDA may copy from, or read, without a buffer between."""

from __future__ import annotations

import contextlib

import torch

PORTABLE, MAPPED = 1, 2
"""Flags: for every context; with an address on the device."""


def page_lock(address: int, size: int, flags: int = 0) -> int:
    """Register memory with CUDA. Returns its status: 0 where it is registered."""
    status = int(torch.cuda.cudart().cudaHostRegister(address, size, flags))
    if status != 0 and torch.cuda.is_initialized():
        # CUDA's runtime keeps the refusal, and torch's next launch would report it as its own: this one takes it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return status


def unlock(address: int) -> None:
    """Unregister memory that was registered."""
    torch.cuda.cudart().cudaHostUnregister(address)
