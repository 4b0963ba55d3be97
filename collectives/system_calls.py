"""Numbers of Linux system calls that neither Python nor the C library wraps, by processor."""

from __future__ import annotations

import platform
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
