"""Memory of a store: anonymous files, in memory or in a folder, that other processes of the host open through /proc.

No file has a name, so none is left behind: the kernel frees it with the last process that has it open or mapped.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from actors.replay.errors import ReplayError
from placement.inventory.limits import memory_bytes

PAGE = mmap.PAGESIZE
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
"""Of Linux; Python does not name them."""
HUGE_PAGE = 2**21
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)


def page_aligned(size: int) -> int:
    """The bytes of the fewest whole pages that hold ``size`` bytes, at least one."""
    return max(1, -(-size // PAGE)) * PAGE


def create(size: int, folder: Path | None) -> int:
    """Descriptor of a new file of ``size`` zeros, in memory or in a folder on disk.

    It is allocated now: a write that finds no space later would end the process.

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
            if folder is None:
                _fill_with_huge_pages(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)  # what has no page yet
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise ReplayError(
            f"a replay store needs {size / 2**20:,.1f} MiB in {where} ({error.strerror}): lower capacity or max_length, "
            "or give a folder for rows that do not fit into memory_bytes"
        ) from error
    return descriptor


def _fill_with_huge_pages(descriptor: int, size: int) -> None:
    """Give an empty file in memory huge pages, as many as there are. They are filled with zeros.

    Random rows of small pages cost a TLB miss each. MADV_COLLAPSE (Linux 6.1) needs no setting of the system; without it the
    file has small pages, or those of /sys/kernel/mm/transparent_hugepage/shmem_enabled.
    """
    os.ftruncate(descriptor, size)
    whole = size // HUGE_PAGE * HUGE_PAGE
    for begin in range(0, whole, HUGE_PAGE):
        os.pwrite(descriptor, b"\0", begin)  # Linux refuses to collapse what has no page at all
    if whole:
        space, begin = _map(descriptor, size)
        with suppress(OSError):
            space.madvise(_MADV_COLLAPSE, begin, whole)


def _map(descriptor: int, size: int) -> tuple[mmap.mmap, int]:
    """Map a whole file at a multiple of a huge page's size: elsewhere its huge pages are entered as small ones.

    Returns:
        What unmaps it when it is deleted, and where the file begins in it.

    Raises:
        OSError: there is no address space.
    """
    try:
        # Address space without memory, of which the file takes an aligned part.
        space = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:  # Linux was told to promise no more memory than there is (overcommit_memory)
        return mmap.mmap(descriptor, size), 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(space))
    begin = -address % HUGE_PAGE
    access, sharing = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address + begin, size, access, sharing, descriptor, 0) != address + begin:
        raise OSError(0, "no address space is left")
    return space, begin


def map_shared(descriptor: int, *, populate: bool) -> memoryview:
    """Map a whole file, with huge pages where it has them. It is unmapped with the last view.

    ``populate``: enter all pages now; else the first access to each is a page fault.
    """
    size = os.fstat(descriptor).st_size
    space, begin = _map(descriptor, size)
    with suppress(OSError):  # for those of /sys/kernel/mm/transparent_hugepage/shmem_enabled
        space.madvise(mmap.MADV_HUGEPAGE, begin, size)
    if populate:
        with suppress(OSError):  # Linux before 5.14
            space.madvise(_MADV_POPULATE_WRITE, begin, size)
    return memoryview(space)[begin : begin + size]


def endpoint(descriptor: int) -> str:
    """How other processes of this user open a file of this process. The inode detects a reused descriptor."""
    return f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"


def open_endpoint(found: str) -> int:
    """Open a file of another process. Raises ReplayError where it no longer exists, or cannot be opened."""
    path, _, inode = found.partition("#")
    try:
        if os.stat(path).st_ino != int(inode):
            raise ReplayError(f"the replay store at {path} no longer exists: its process has closed it")
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if isinstance(error, ReplayError):
            raise
        why = (
            "is its process of another user"
            if isinstance(error, PermissionError)
            else "has its process ended"
        )
        raise ReplayError(f"the replay store at {found!r} cannot be opened ({error}): {why}?") from error
