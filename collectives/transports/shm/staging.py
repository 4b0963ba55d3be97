"""Staging memory for tensors that are not in registered memory: two buffers per member, filled and read by turns.

Members read one buffer while each fills its other one, so one barrier per piece is enough. A member refills the first
buffer only after the second piece's barrier, which no member passes while it still reads the first piece.

Device tensors are copied asynchronously on the current stream, from and to pinned memory. The copies of
a piece overlap with the reduction of the previous piece.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from collectives.page_locking import page_lock, unlock
from collectives.transports.shm.memory import STAGING_BUFFER_BYTES, Region

_logger = logging.getLogger(__name__)


@lru_cache(maxsize=256)
def pieces(numel: int, itemsize: int) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each piece, in elements, of at most one staging buffer; one empty piece for an empty tensor."""
    step = STAGING_BUFFER_BYTES // itemsize
    return tuple((begin, min(begin + step, numel)) for begin in range(0, numel or 1, step))


class Staging:
    """The two staging buffers and which one is next. Pieces are element ranges of flat, contiguous tensors."""

    def __init__(self, staging_buffers: Sequence[Region], rank: int) -> None:
        self._staging_buffers, self._rank = staging_buffers, rank
        self._turn = 0
        self._tried_to_pin = False
        self._pinned: list[int] = []
        """Addresses."""
        self._addresses = [
            [piece.data_ptr() for piece in staging_buffer.pieces] for staging_buffer in staging_buffers
        ]

    def next_buffer(self) -> int:
        """Index of the buffer for the next piece: 0 and 1 by turns, across operations."""
        self._turn ^= 1
        return self._turn

    def put(self, tensor: Tensor, piece: tuple[int, int], staging_buffer: int) -> None:
        """Copy a piece of this member's tensor into its own staging memory."""
        begin, end = piece
        if tensor.is_cpu:
            size = tensor.element_size()
            source = tensor.data_ptr() + begin * size
            ctypes.memmove(self._addresses[staging_buffer][self._rank], source, (end - begin) * size)
        else:
            self._view(tensor, end - begin, staging_buffer, self._rank).copy_(
                tensor[begin:end], non_blocking=True
            )

    def take(self, tensor: Tensor, piece: tuple[int, int], staging_buffer: int, rank: int) -> None:
        """Copy a piece out of a member's staging memory into this member's tensor."""
        begin, end = piece
        if tensor.is_cpu:
            size = tensor.element_size()
            destination = tensor.data_ptr() + begin * size
            ctypes.memmove(destination, self._addresses[staging_buffer][rank], (end - begin) * size)
        else:
            tensor[begin:end].copy_(self._view(tensor, end - begin, staging_buffer, rank), non_blocking=True)

    def synchronize(self, tensor: Tensor) -> None:
        """Wait until the copies from and to this tensor are done."""
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()

    def pin(self, tensor: Tensor) -> None:
        """Pin the staging memory for asynchronous copies, when the first CUDA tensor comes.

        Where CUDA refuses, as in WSL, copies are not asynchronous, and right all the same.
        """
        if not tensor.is_cuda or self._tried_to_pin:
            return
        self._tried_to_pin = True
        for staging_buffer in self._staging_buffers:
            address, size = (
                staging_buffer.pieces[0].data_ptr(),
                len(staging_buffer.pieces) * STAGING_BUFFER_BYTES,
            )
            status = page_lock(address, size)
            if status == 0:
                self._pinned.append(address)
            else:
                _logger.warning(
                    "staging memory is not page-locked (error %s): copies to the GPU are slower", status
                )

    def close(self) -> None:
        """Unpin and release the memory. Safe to call twice."""
        for address in self._pinned:
            unlock(address)
        self._pinned = []
        self._staging_buffers = ()

    def _view(self, tensor: Tensor, numel: int, staging_buffer: int, rank: int) -> Tensor:
        return (
            self._staging_buffers[staging_buffer]
            .pieces[rank][: numel * tensor.element_size()]
            .view(tensor.dtype)
        )
