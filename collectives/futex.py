"""Linux futexes between processes: sleep on a word of shared memory until its writer wakes the sleepers."""

from __future__ import annotations

import ctypes
import platform
import time
from functools import cache
from typing import NamedTuple


class SyscallNumbers(NamedTuple):
    """System call numbers, from the ``asm/unistd.h`` of one processor type."""

    futex: int
    membarrier: int


BY_MACHINE = {
    "x86_64": SyscallNumbers(futex=202, membarrier=324),
    "ppc64le": SyscallNumbers(futex=221, membarrier=365),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), SyscallNumbers(futex=98, membarrier=283)),
}
SYSCALL_NUMBERS = BY_MACHINE.get(platform.machine())
"""Of this machine; None if they are not known."""


_FUTEX_WAIT, _FUTEX_WAKE, _FUTEX_TRYLOCK_PI = 0, 1, 8
_EVERYONE = 2**31 - 1
_SLEEP_S = 1e-3
"""Sleep on a processor whose system call numbers are not known."""


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec))
_syscall.restype = ctypes.c_long


def sleep(address: int, expected: int, limit_s: float) -> None:
    """Sleep until woken, for at most ``limit_s``. Returns at once if the word is not ``expected``; a signal also ends it.

    The word has 32 bits, or is the lower half of one of 64 bits; the lower 32 bits of ``expected`` count.
    """
    if SYSCALL_NUMBERS is None:
        time.sleep(min(limit_s, _SLEEP_S))
        return
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    _syscall(SYSCALL_NUMBERS.futex, address, _FUTEX_WAIT, expected & 0xFFFFFFFF, limit)


def claim(address: int) -> bool:
    """Set a word from 0 to another value, as one step: true for the one caller, of all processes, that did.

    The word as of ``sleep``. The compare-and-swap is the kernel's (``FUTEX_TRYLOCK_PI``), which needs no compiler;
    nothing is ever unlocked.
    """
    return (
        SYSCALL_NUMBERS is not None
        and _syscall(SYSCALL_NUMBERS.futex, address, _FUTEX_TRYLOCK_PI, 0, None) == 0
    )


@cache
def can_claim() -> bool:
    """Whether this kernel has ``claim``."""
    return claim(ctypes.addressof(ctypes.c_uint64(0)))


def wake(address: int) -> None:
    """Wake all that sleep on this word."""
    if SYSCALL_NUMBERS is not None:
        _syscall(SYSCALL_NUMBERS.futex, address, _FUTEX_WAKE, _EVERYONE, None)
