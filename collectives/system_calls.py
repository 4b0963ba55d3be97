"""Numbers of Linux system calls that neither Python nor the C library offers, by processor."""

from __future__ import annotations

import platform
from typing import NamedTuple


class Numbers(NamedTuple):
    """Of system calls, from the ``asm/unistd.h`` of one kind of processor."""

    futex: int
    membarrier: int


BY_MACHINE = {
    "x86_64": Numbers(futex=202, membarrier=324),
    "ppc64le": Numbers(futex=221, membarrier=365),
    **dict.fromkeys(("aarch64", "riscv64", "loongarch64"), Numbers(futex=98, membarrier=283)),
}
NUMBERS = BY_MACHINE.get(platform.machine())
"""Of this machine; None where they are not known."""
