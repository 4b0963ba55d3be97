"""Memory that the members of one host share: an anonymous file, and symmetric regions of it.

The file has no name that could be left behind: it goes with the last process that maps it. Members of the same user open
it through rank 0's descriptor in /proc. A region is one piece of equal size per member; every member maps all pieces.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import sys
from typing import Self

import torch
from torch import Tensor

from collectives.errors import CommunicatorError
from collectives.rendezvous import PROTOCOL

CACHE_LINE_BYTES = 64
LINES_PER_MEMBER = 4
"""What a member says at barriers, its goodbye, and the two counters of its share (``kernel.c``)."""
HEADER_BYTES = LINES_PER_MEMBER * CACHE_LINE_BYTES
"""What rank 0 says of the segment, before the members' words: its first word is the protocol's version."""
HALVES = 2
HALF_BYTES = 2**19
"""A member's staging memory is two halves of this size: one is filled while the other is read."""


def is_supported() -> bool:
    """Whether this host keeps plain stores in order and offers anonymous shared files.

    Data is published by a plain store to a counter. x86-64 makes stores visible in program order; other processors
    need fences that Python does not offer, and are left to Gloo.
    """
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


class Region:
    """One piece of shared memory per member, all of one size."""

    def __init__(self, memory: mmap.mmap, begin: int, piece_bytes: int, world_size: int) -> None:
        # The tensors keep the mapping: it ends when the last of them does.
        self.pieces = tuple(
            torch.frombuffer(memory, dtype=torch.uint8, count=piece_bytes, offset=begin + rank * piece_bytes)
            for rank in range(world_size)
        )
        self._all = torch.frombuffer(memory, dtype=torch.uint8, count=piece_bytes * world_size, offset=begin)

    def views(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The beginning of every member's piece as (numel,) of this type, by rank."""
        return tuple(piece[: numel * dtype.itemsize].view(dtype) for piece in self.pieces)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """All pieces as one: its beginning as (numel,) of this type."""
        return self._all[: numel * dtype.itemsize].view(dtype)


class Segment:
    """The file: a header, words for barriers, two staging regions, then a region per registered buffer."""

    def __init__(self, descriptor: int, endpoint: str, world_size: int) -> None:
        self.endpoint = endpoint
        self.world_size = world_size
        self._descriptor: int | None = descriptor
        self._end = _segment_bytes(world_size)
        memory = mmap.mmap(descriptor, self._end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        words_end = _words_end(world_size)
        self.header = memoryview(memory)[:HEADER_BYTES].cast("Q")
        self.words = memoryview(memory)[HEADER_BYTES:words_end].cast("Q")
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1, offset=HEADER_BYTES).data_ptr()
        """Of the words."""
        self.halves = tuple(
            Region(memory, words_end + half * world_size * HALF_BYTES, HALF_BYTES, world_size)
            for half in range(HALVES)
        )

    @classmethod
    def host(cls, world_size: int) -> Self:
        """Make a zeroed segment, as rank 0. The others attach by its ``endpoint``.

        Raises:
            CommunicatorError: there is no memory for it.
        """
        descriptor = os.memfd_create("rayagi-collective", os.MFD_CLOEXEC)
        try:
            back_with_memory(descriptor, 0, _segment_bytes(world_size))
            segment = cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", world_size)
        except OSError as error:
            os.close(descriptor)
            raise CommunicatorError("connect", 0, "nobody", 0.0, f"cannot make a segment: {error}") from error
        segment.header[0] = PROTOCOL
        return segment

    @classmethod
    def attach(cls, endpoint: str, world_size: int, rank: int) -> Self:
        """Map the segment that rank 0 made for as many members.

        Raises:
            CommunicatorError: it is not there any more, belongs to another user, or has another size or version.
        """
        try:
            descriptor = os.open(endpoint, os.O_RDWR | os.O_CLOEXEC)
            try:
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
                "connect", rank, "rank 0's segment", 0.0, f"cannot map {endpoint}: {error}"
            ) from error

    def reserve(self, piece_bytes: int) -> None:
        """Make the file larger by a region; rank 0 does, before the others map it.

        Raises:
            OSError: there is no memory for it.
        """
        back_with_memory(self._open(), self._end, self.world_size * piece_bytes)

    def map_region(self, piece_bytes: int) -> Region:
        """Map the next region; every member asks for the same sizes in the same order.

        Raises:
            OSError: there is no room for it among the addresses of this process.
        """
        size = self.world_size * piece_bytes
        memory = mmap.mmap(self._open(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=self._end)
        self._end += size
        return Region(memory, 0, piece_bytes, self.world_size)

    def close(self) -> None:
        """Close the file and let go of words and staging memory. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.header = self.words = memoryview(b"").cast("Q")
        self.halves = ()

    def _open(self) -> int:
        if self._descriptor is None:
            raise ValueError("this segment is closed")
        return self._descriptor


def page_aligned(size: int) -> int:
    """The bytes of the fewest whole pages that hold ``size`` bytes, at least one."""
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE


def _words_end(world_size: int) -> int:
    return page_aligned(HEADER_BYTES + LINES_PER_MEMBER * world_size * CACHE_LINE_BYTES)


def _segment_bytes(world_size: int) -> int:
    return _words_end(world_size) + HALVES * world_size * HALF_BYTES


def back_with_memory(descriptor: int, begin: int, size: int) -> None:
    """Give the file memory now: a later write without memory behind it would end the process with SIGBUS."""
    if size > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:  # Linux would try, and end processes to find it
        raise OSError(errno.ENOMEM, "that is more than this host's memory")
    os.posix_fallocate(descriptor, begin, size)
