"""Memory of this process on its host: what is held, the most that was held, and giving back what is no longer used."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc/self")


def resident_bytes() -> int:
    """Resident memory; 0 where the system does not tell."""
    try:
        return int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_bytes() -> int:
    """The most that was resident since ``reset_peak``, or since the process began; 0 where the system does not tell."""
    with suppress(OSError):
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> bool:
    """Let ``peak_bytes`` begin at what is resident now; False where the system does not allow it."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Collect what nothing refers to, and return freed memory to the system, so that what is resident is in use."""
    gc.collect()
    # glibc keeps what was freed in its arenas; other C libraries have no such call.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
