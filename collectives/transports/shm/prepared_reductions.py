"""Caches of everything that a reduction needs besides its tensor: encoded call, views, chunks, kernel arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.transports import calls
from collectives.transports.base import ReduceOp, shares
from collectives.transports.calls import ON_DEVICE, ON_HOST
from collectives.transports.shm import kernel
from collectives.transports.shm.memory import NUM_STAGING_BUFFERS, Region

_CHUNK_BYTES = 2**17 - 64
"""Of the accumulator. Chunks of four members fit a second-level cache of 1 MiB. A chunk has fewer elements than torch splits
over threads, which would cost more than they save and compete with other members' threads."""
_ALIGN_ELEMENTS = 16
_SMALL_BYTES = 2**15
"""Largest registered tensor for one-shot: below it, a barrier costs more than reducing everything on every member. Other
tensors also save two copies, so their limit is a chunk."""


def chunk_elements(op: ReduceOp, dtype: torch.dtype) -> int:
    """Elements that one call of ``combine`` reduces, at most. bfloat16 is summed in float32."""
    accumulated = torch.float32 if dtype == torch.bfloat16 and op != "max" else dtype
    return _CHUNK_BYTES // accumulated.itemsize // _ALIGN_ELEMENTS * _ALIGN_ELEMENTS


def chunks(begin: int, end: int, size: int) -> Iterator[slice]:
    """Split [begin, end) into slices of at most ``size`` elements."""
    for start in range(begin, end, size):
        yield slice(start, min(start + size, end))


class Chunk(NamedTuple):
    """Inputs and output of one ``combine`` call, and the views that the result is copied to."""

    parts: tuple[Tensor, ...]
    out: Tensor
    copies: tuple[Tensor, ...]


class PreparedReduction(NamedTuple):
    """A reduction of tensors of one type, size and place."""

    word: int
    op: ReduceOp
    dtype: torch.dtype
    receivers: range
    """Ranks that get a result."""
    one_shot: bool
    """Whether each receiver reduces all staged tensors into its own."""
    share: tuple[int, int]
    """[begin, end) that this member reduces, of a registered buffer."""
    compiled: tuple[kernel.Operation, ...]
    """Arguments of ``KernelBarrier.run``: one per staging buffer for one-shot, one for two-shot. Empty without a kernel,
    and for staged reductions."""


class PreparedReductions:
    """One member's prepared reductions. Regions may be added to the list that it was made with."""

    def __init__(self, regions: Sequence[Region], world_size: int, rank: int, *, compiled: bool) -> None:
        self._regions, self._world_size, self._rank, self._compiled = regions, world_size, rank, compiled
        self.reduction = lru_cache(maxsize=256)(self._reduction)
        """A prepared reduction by call, operator, dtype, number of elements, place, layout."""
        self.share = lru_cache(maxsize=256)(self._share)
        """This member's chunks of a region's first elements, by operator, dtype, region, number of elements, receivers."""
        self.compiled_share = lru_cache(maxsize=256)(self._compiled_share)
        """The same for ``KernelBarrier.reduce_share``."""
        self.staged_views = lru_cache(maxsize=256)(self._staged_views)
        """Every member's first elements in a staging buffer, by dtype, buffer, number of elements."""

    def clear(self) -> None:
        """Drop all cached views."""
        for kept in (self.reduction, self.share, self.compiled_share, self.staged_views):
            kept.cache_clear()

    def _reduction(
        self, call: str, op: ReduceOp, dtype: torch.dtype, numel: int, place: int, layout: int = 0
    ) -> PreparedReduction:
        staged = place in (ON_HOST, ON_DEVICE)
        small = chunk_elements(op, dtype) if place == ON_HOST else _SMALL_BYTES // dtype.itemsize
        one_shot = numel <= small and place != ON_DEVICE
        if call == "reduce":
            receivers = range(1)
        elif call == "reduce_scatter" and not staged:
            receivers = range(self._rank, self._rank + 1)
        else:  # scattering saves nothing outside of registered memory
            receivers = range(self._world_size)
        word = calls.encode_call(call, calls.OPS.index(op), dtype, numel, place, layout)
        compiled: tuple[kernel.Operation, ...] = ()
        if self._compiled and one_shot:
            outputs = 1 if call == "reduce" else self._world_size
            compiled = tuple(
                kernel.reduction("one_shot", word, op, dtype, numel, staging_buffer.pieces, outputs)
                for staging_buffer in self._regions[:NUM_STAGING_BUFFERS]
            )
        elif self._compiled and not staged:
            outputs = 0 if call == "reduce_scatter" else len(receivers)
            pieces = self._regions[region_of(place)].pieces
            compiled = (kernel.reduction("two_shot", word, op, dtype, numel, pieces, outputs),)
        return PreparedReduction(
            word, op, dtype, receivers, one_shot, shares(numel, self._world_size)[self._rank], compiled
        )

    def _compiled_share(
        self, op: ReduceOp, dtype: torch.dtype, region: int, numel: int, receivers: range
    ) -> kernel.Operation:
        return kernel.reduction("two_shot", 0, op, dtype, numel, self._regions[region].pieces, len(receivers))

    def _staged_views(self, dtype: torch.dtype, staging_buffer: int, numel: int) -> tuple[Tensor, ...]:
        return self._regions[staging_buffer].views(numel, dtype)

    def _share(
        self, op: ReduceOp, dtype: torch.dtype, region: int, numel: int, receivers: range
    ) -> list[Chunk]:
        members = self._regions[region].views(numel, dtype)
        begin, end = shares(numel, self._world_size)[self._rank]
        return [
            Chunk(
                parts=tuple(member[chunk] for member in members),
                out=members[0][chunk],
                copies=tuple(members[rank][chunk] for rank in receivers if rank != 0),
            )
            for chunk in chunks(begin, end, chunk_elements(op, dtype))
        ]


def region_of(place: int) -> int:
    """Region index of a registered buffer: the staging buffers come first."""
    return NUM_STAGING_BUFFERS + place - 1
