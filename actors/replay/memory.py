"""Memory of a store: anonymous files, in memory or in a folder, that other processes of the host open through /proc.

No file has a name, so none is left behind: the kernel frees it with the last process that has it open or mapped.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from actors.replay.errors import ReplayError
from placement.inventory.limits import memory_bytes

PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
"""Of Linux; Python does not name it."""


def page_aligned(size: int) -> int:
    """The bytes of the fewest whole pages that hold ``size`` bytes, at least one."""
    return max(1, -(-size // PAGE)) * PAGE


def create(size: int, folder: Path | None) -> int:
    """Descriptor of a new file of zeros, allocated now: a write that finds no space later would end the process.

    Args:
        size: bytes
        folder: for a file on disk; None for memory

    Raises:
        ReplayError: there is not enough space.
    """
    where = "memory" if folder is None else str(folder)
    try:
        if folder is None:
            if size > memory_bytes():  # Linux would try, and kill processes for it
                raise OSError(0, "more than this host, or this process's cgroup, has")
            descriptor = os.memfd_create("rayagi-replay", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                descriptor = os.dup(file.fileno())
        try:
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise ReplayError(
            f"a replay store needs {size / 2**20:,.1f} MiB in {where} ({error.strerror}): lower capacity or max_length, "
            "or give a folder for rows that do not fit into memory_bytes"
        ) from error
    return descriptor


def map_shared(descriptor: int, *, populate: bool) -> mmap.mmap:
    """Map a whole file, with huge pages where the system allows them for shared memory.

    Args:
        descriptor: of the file
        populate: enter all pages now; else the first access to each is a page fault
    """
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    with suppress(OSError, AttributeError):  # /sys/kernel/mm/transparent_hugepage/shmem_enabled
        memory.madvise(mmap.MADV_HUGEPAGE)
    if populate:
        with suppress(OSError):  # Linux before 5.14
            memory.madvise(_MADV_POPULATE_WRITE)
    return memory


def endpoint(descriptor: int) -> str:
    """How other processes of this user open a file of this process. The inode detects a reused descriptor."""
    return f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"


def open_endpoint(found: str) -> int:
    """Open a file of another process.

    Raises:
        ReplayError: it no longer exists, or cannot be opened.
    """
    path, _, inode = found.partition("#")
    try:
        if os.stat(path).st_ino != int(inode):
            raise ReplayError(f"the replay store at {path} no longer exists: its process has closed it")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, ReplayError):
            raise
        raise ReplayError(
            f"the replay store at {found!r} cannot be opened ({error}): has its process ended?"
        ) from error
