"""Shared memory of the members of one host: an anonymous file (memfd) and symmetric regions of it.

The file has no name to clean up: the kernel frees it with the last process that maps it. Members of the same user open it
through rank 0's descriptor in /proc. A region has one piece of equal size per member; every member maps all pieces.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
import weakref
from typing import NamedTuple, Self

import torch
from torch import Tensor

from collectives.errors import CommunicatorError
from collectives.rendezvous import PROTOCOL
from collectives.shared_words import shared_words

_logger = logging.getLogger(__name__)

CACHE_LINE_BYTES = 64
LINES_PER_MEMBER = 4
"""Arrivals and calls; goodbye; claimed chunks; finished chunks (``struct member_slot`` of ``kernel.c``)."""
HEADER_BYTES = LINES_PER_MEMBER * CACHE_LINE_BYTES
"""``struct header`` of ``kernel.c``, before the members' slots. Its first word is the protocol's version."""
NUM_STAGING_BUFFERS = 2
STAGING_BUFFER_BYTES = 2**19
"""Of each member and staging buffer: one is filled while the other is read."""

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOVE_THERE = 1 | 2
"""MREMAP_MAYMOVE | MREMAP_FIXED of Linux, which Python does not name: atomically replaces the mapping at that address."""
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class Region:
    """One piece of shared memory per member, all of one size."""

    def __init__(self, memory: mmap.mmap, begin: int, piece_bytes: int, world_size: int) -> None:
        # The tensors keep the mapping alive: it ends with the last of them.
        self.pieces = tuple(
            torch.frombuffer(memory, dtype=torch.uint8, count=piece_bytes, offset=begin + rank * piece_bytes)
            for rank in range(world_size)
        )

    def views(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The beginning of every member's piece as (numel,) of this type, by rank."""
        return tuple(piece[: numel * dtype.itemsize].view(dtype) for piece in self.pieces)

    @property
    def address(self) -> int:
        """Address of the first piece."""
        return self.pieces[0].data_ptr()


class Segment:
    """The file: header, members' slots, two staging buffers, then a region per registered buffer."""

    def __init__(self, descriptor: int, endpoint: str, world_size: int) -> None:
        self.endpoint, self.world_size = endpoint, world_size
        self._descriptor: int | None = descriptor
        self._end = _segment_bytes(world_size)
        self._caller_owned: list[_CallerOwnedMapping] = []
        memory = mmap.mmap(descriptor, self._end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        words_end = _words_end(world_size)
        self.header = memoryview(memory)[:HEADER_BYTES].cast("Q")
        self.words = shared_words(memoryview(memory)[HEADER_BYTES:words_end].cast("Q"))
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1, offset=HEADER_BYTES).data_ptr()
        """Of the members' slots."""
        self.staging_buffers = tuple(
            Region(
                memory,
                words_end + staging_buffer * world_size * STAGING_BUFFER_BYTES,
                STAGING_BUFFER_BYTES,
                world_size,
            )
            for staging_buffer in range(NUM_STAGING_BUFFERS)
        )

    @classmethod
    def host(cls, world_size: int) -> Self:
        """Make a zeroed segment, as rank 0. The others attach by its ``endpoint``.

        Raises:
            CommunicatorError: there is no memory for it.
        """
        descriptor = os.memfd_create("rayagi-collective", os.MFD_CLOEXEC)
        try:
            preallocate(descriptor, 0, _segment_bytes(world_size))
            # With the inode, because descriptor numbers are reused.
            endpoint = f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"
            segment = cls(descriptor, endpoint, world_size)
        except OSError as error:
            os.close(descriptor)
            raise CommunicatorError("connect", 0, "nobody", 0.0, f"cannot make a segment: {error}") from error
        segment.header[0] = PROTOCOL  # before the endpoint leaves this process: who attaches reads it
        return segment

    @classmethod
    def attach(cls, endpoint: str, world_size: int, rank: int) -> Self:
        """Map the segment that rank 0 made for as many members.

        Raises:
            CommunicatorError: it no longer exists, belongs to another user, or has another size or version.
        """
        path, _, inode = endpoint.partition("#")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if str(os.fstat(descriptor).st_ino) != inode:
                    raise ValueError("it no longer exists: another file has its number")
                version = int.from_bytes(os.pread(descriptor, 8, 0), sys.byteorder)
                if version != PROTOCOL:
                    raise ValueError(
                        f"it has version {version} of rayagi's protocol, and this process has {PROTOCOL}"
                    )
                found, expected = os.fstat(descriptor).st_size, _segment_bytes(world_size)
                if found != expected:
                    raise ValueError(f"it has {found} bytes, not {expected} as for {world_size} members")
                return cls(descriptor, endpoint, world_size)
            except BaseException:
                os.close(descriptor)
                raise
        except (OSError, ValueError) as error:
            raise CommunicatorError(
                "connect", rank, "rank 0's segment", 0.0, f"cannot map {path}: {error}"
            ) from error

    def reserve(self, piece_bytes: int) -> None:
        """Extend the file by a region; called by rank 0 before the others map it.

        Raises:
            OSError: there is no memory for it.
        """
        preallocate(self._open(), self._end, self.world_size * piece_bytes)

    def map_region(self, piece_bytes: int, caller_rank: int) -> Region:
        """Map the next region; every member requests the same sizes, in whole pages, in the same order.

        The piece of ``caller_rank`` stays usable after ``close``. Raises OSError where this process has no free address
        range.
        """
        size = self.world_size * piece_bytes
        memory = mmap.mmap(self._open(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=self._end)
        self._end += size
        region = Region(memory, 0, piece_bytes, self.world_size)
        begin = caller_rank * piece_bytes
        self._caller_owned.append(
            _CallerOwnedMapping(weakref.ref(memory), region.address, size, begin, piece_bytes)
        )
        return region

    def close(self) -> None:
        """Close the file, release slots and staging memory. Safe to call twice.

        Regions that the caller keeps become private memory with the same addresses and contents. A member that was
        suspended during an operation may still write to the shared memory when it resumes, but no longer to these.
        """
        for mapping in self._caller_owned:
            mapping.make_private()
        self._caller_owned.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.header = memoryview(b"").cast("Q")
        self.words = shared_words(self.header)
        self.staging_buffers = ()

    def _open(self) -> int:
        if self._descriptor is None:
            raise ValueError("this segment is closed")
        return self._descriptor


class _CallerOwnedMapping(NamedTuple):
    """A mapping of which the caller may keep a part after the segment is closed. Sizes in bytes, whole pages."""

    memory: weakref.ref[mmap.mmap]
    address: int
    size: int
    begin: int
    kept_size: int

    def make_private(self) -> None:
        """Replace the mapping by private memory in one step, with a copy of the part that the caller may keep."""
        memory = self.memory()  # stays mapped while this name refers to it
        if memory is None:
            return
        # 1. Private memory elsewhere, with a copy; 2. one system call moves it over the shared mapping. A store before it
        # reaches the shared memory, one after it the copy; at no time is the address unmapped.
        private = _libc.mmap(None, self.size, _READ_WRITE, _PRIVATE, -1, 0)
        if private != _MAP_FAILED:
            ctypes.memmove(private + self.begin, self.address + self.begin, self.kept_size)
            if _libc.mremap(private, self.size, self.size, _MOVE_THERE, self.address) != _MAP_FAILED:
                return
        _logger.error(
            "%d bytes of shared memory cannot be made private (%s): a suspended member may still write to them",
            self.kept_size,
            os.strerror(ctypes.get_errno()),
        )


def page_aligned(size: int) -> int:
    """The bytes of the fewest whole pages that hold ``size`` bytes, at least one."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _words_end(world_size: int) -> int:
    return page_aligned(HEADER_BYTES + LINES_PER_MEMBER * world_size * CACHE_LINE_BYTES)


def _segment_bytes(world_size: int) -> int:
    return _words_end(world_size) + NUM_STAGING_BUFFERS * world_size * STAGING_BUFFER_BYTES


class MemoryLimit:
    """Memory that this process may use: the host's, or less where the process knows of a limit (a container's cgroup)."""

    def __init__(self) -> None:
        self.max_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE

    def lower(self, max_bytes: int) -> None:
        """Set a smaller limit; a larger one than known changes nothing."""
        self.max_bytes = min(self.max_bytes, max_bytes)


MEMORY_LIMIT = MemoryLimit()
"""Of this process."""


def preallocate(descriptor: int, begin: int, size: int) -> None:
    """Allocate the file's memory now: otherwise a write that finds no memory would end the process with SIGBUS.

    Raises:
        OSError: there is no memory for it.
    """
    if size > MEMORY_LIMIT.max_bytes:  # Linux would try, and kill processes for it
        raise OSError(errno.ENOMEM, "that is more memory than this host, or this process's cgroup, has")
    os.posix_fallocate(descriptor, begin, size)
