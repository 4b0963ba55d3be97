"""Memory of this process: resident size, its peak, what it holds on a GPU, and the release of freed memory."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

_PROC = Path("/proc/self")


def resident_bytes() -> int:
    """Resident memory; 0 if the system does not report it."""
    try:
        return int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Resident memory, and what this process holds on a GPU."""
    held = {"resident_bytes": float(resident_bytes())}
    if device.type == "cuda":
        held["device_bytes"] = float(device_bytes(device))
    return held


def device_bytes(device: torch.device) -> int:
    """Torch's peak of reserved memory of a GPU, and what Warp has from its own pool, where the worlds of MuJoCo Warp are.

    The CUDA context, kernels, and what CUDA graphs allocate while they run are not included.
    """
    held = int(torch.cuda.max_memory_reserved(device))
    of_pool = getattr(
        sys.modules.get("warp"), "get_mempool_used_mem_current", None
    )  # if this process uses Warp
    if of_pool is not None:
        with suppress(RuntimeError):  # the device has no memory pools
            held += int(of_pool(str(device)))
    return held


def peak_bytes() -> int:
    """Peak resident memory since ``reset_peak`` or the process start; 0 if the system does not report it."""
    with suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> bool:
    """Reset ``peak_bytes`` to the current resident memory; False if the system does not allow it."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Run the garbage collector, and return freed memory to the system, so that resident memory is memory in use."""
    gc.collect()
    # glibc keeps freed memory in its arenas; other C libraries have no malloc_trim.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
