"""64-bit words in shared memory, accessed in program order.

One process writes data and then the word that publishes them; another reads the word and then the data. On x86-64 stores
become visible, and loads happen, in program order, so plain accesses suffice. On aarch64 and riscv64 they do not: there each
access is a call of ``shared_words.c``, or, without a C compiler, is enclosed by two membarrier system calls.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from typing import Protocol

import numpy as np

from collectives.futex import SYSCALL_NUMBERS
from collectives.kernels import Kernel

WORDS = Kernel(
    name="shared words",
    module=__name__,
    reference=f"{__name__}:FencedWords",
    without="shared memory: words without compiled atomics, which are faster",
    level=logging.WARNING,
)
WORD_BYTES = 8
_IN_ORDER = ("x86_64", "AMD64")
_BARRIER, _REGISTER_FOR_BARRIERS = 2, 4
"""MEMBARRIER_CMD_GLOBAL_EXPEDITED and MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED."""


class SharedWords(Protocol):
    """Unsigned 64-bit words by index. No other memory access of the program is reordered across an access to them."""

    def __getitem__(self, index: int, /) -> int:
        """Load a word."""

    def __setitem__(self, index: int, value: int, /) -> None:
        """Store a word."""

    def __len__(self) -> int: ...


def shared_words(memory: memoryview) -> SharedWords:
    """The shared memory, of format Q, as words, with the access method of this machine.

    Raises:
        ValueError: this machine cannot order accesses; ``unsupported_reason`` says why.
    """
    made = _select_access()
    if made is None:
        raise ValueError(unsupported_reason())
    return made(memory)


def unsupported_reason() -> str:
    """Why processes of this machine cannot share memory; empty if they can."""
    if not hasattr(os, "memfd_create"):
        return "shared memory needs Linux"
    if sys.byteorder != "little" or sys.maxsize < 2**32:  # a futex is the lower half of a word
        return "shared memory needs a little-endian machine of 64 bits"
    if _select_access() is None:
        return (
            f"shared memory on {platform.machine()} needs a C compiler, or the system call membarrier; "
            "install a compiler or set CC"
        )
    return ""


class AtomicWords:
    """Words accessed by ``shared_words.c``: sequentially consistent atomics."""

    def __init__(self, library: ctypes.CDLL, memory: memoryview) -> None:
        self._memory = memory  # keeps the mapping alive
        self._address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
        self._load, self._store = library.rayagi_load, library.rayagi_store

    def __getitem__(self, index: int) -> int:
        return self._load(self._address + WORD_BYTES * index)

    def __setitem__(self, index: int, value: int) -> None:
        self._store(self._address + WORD_BYTES * index, value)

    def __len__(self) -> int:
        return len(self._memory)


class FencedWords:
    """Words accessed plainly between two memory barriers: the same order without a compiler."""

    def __init__(self, fence: Callable[[], object], memory: memoryview) -> None:
        self._memory, self._fence = memory, fence

    def __getitem__(self, index: int) -> int:
        self._fence()
        value: int = self._memory[index]
        self._fence()
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._fence()
        self._memory[index] = value
        self._fence()

    def __len__(self) -> int:
        return len(self._memory)


def atomic_words() -> Callable[[memoryview], SharedWords]:
    """Constructor of ``AtomicWords``. Raises CompilerError where there is no compiler."""
    library = WORDS.load(files(__package__).joinpath("shared_words.c").read_text(encoding="utf-8"))
    library.rayagi_load.argtypes, library.rayagi_load.restype = (ctypes.c_void_p,), ctypes.c_uint64
    library.rayagi_store.argtypes, library.rayagi_store.restype = (ctypes.c_void_p, ctypes.c_uint64), None
    return partial(AtomicWords, library)


def fenced_words() -> Callable[[memoryview], SharedWords] | None:
    """Constructor of ``FencedWords``; None if the system lacks or forbids membarrier."""
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes, syscall.restype = (
        (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int),
        ctypes.c_long,
    )
    if SYSCALL_NUMBERS is None or syscall(SYSCALL_NUMBERS.membarrier, _REGISTER_FOR_BARRIERS, 0, 0) != 0:
        return None
    return partial(FencedWords, partial(syscall, SYSCALL_NUMBERS.membarrier, _BARRIER, 0, 0))


@cache
def _select_access() -> Callable[[memoryview], SharedWords] | None:
    """The access method of this machine: plain on x86-64, else atomics, else membarrier; None if neither works."""
    if platform.machine() in _IN_ORDER:
        return lambda memory: memory
    return WORDS.made_or_none(atomic_words) or fenced_words()
