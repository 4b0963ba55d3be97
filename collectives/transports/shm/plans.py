"""What an operation needs beside its tensor: made once, and kept for the next time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.shares import shares
from collectives.transports import calls
from collectives.transports.base import ReduceOp
from collectives.transports.calls import ON_DEVICE, ON_HOST
from collectives.transports.shm import kernel
from collectives.transports.shm.memory import HALVES, Region
from collectives.transports.shm.reduction import Reduction

_SMALL_BYTES = 2**15
"""Up to here a barrier costs more than reducing everything on every member; elsewhere than in registered memory, where
two copies are saved besides, up to a chunk."""


class Chunk(NamedTuple):
    """What one call of a reduction takes, combines into, and where the result is copied to."""

    parts: tuple[Tensor, ...]
    out: Tensor
    copies: tuple[Tensor, ...]


class Plan(NamedTuple):
    """A reduction of tensors of one type, size and place."""

    word: int
    reduction: Reduction
    to: range
    """Members that end with a result."""
    whole: bool
    """Whether each of them reduces everything straight into its tensor, from staging memory."""
    share: tuple[int, int]
    """Elements that this member reduces, of a registered buffer."""
    compiled: tuple[kernel.Operation, ...]
    """The whole operation for ``KernelBarrier.run``; one for each half of the staging memory if it passes there. Without
    a kernel, and where tensors pass in pieces, there is none."""


class Plans:
    """One member's plans. Regions may be added to the list that it was made with."""

    def __init__(self, regions: Sequence[Region], world_size: int, rank: int, *, compiled: bool) -> None:
        self._regions = regions
        self._world_size = world_size
        self._rank = rank
        self._compiled = compiled
        self.reduction = lru_cache(maxsize=256)(self._reduction)
        """A plan by operation, operator, type, number of elements, place, layout."""
        self.share = lru_cache(maxsize=256)(self._share)
        """This member's chunks of the first elements of a region."""
        self.compiled_share = lru_cache(maxsize=256)(self._compiled_share)
        """The same for ``KernelBarrier.reduce_share``, by operator, type, region, number of elements, receivers."""
        self.whole = lru_cache(maxsize=256)(self._whole)
        """Every member's first elements of a half, by type, half, number of elements."""
        self._operators = lru_cache(maxsize=32)(self._operator)

    def clear(self) -> None:
        """Let go of all that holds memory."""
        for kept in (self.reduction, self.share, self.compiled_share, self.whole, self._operators):
            kept.cache_clear()

    def _reduction(
        self, call: str, op: ReduceOp, dtype: torch.dtype, numel: int, place: int, layout: int = 0
    ) -> Plan:
        operator = self._operators(op, dtype)
        staged = place in (ON_HOST, ON_DEVICE)
        small = operator.chunk if place == ON_HOST else _SMALL_BYTES // dtype.itemsize
        whole = numel <= small and place != ON_DEVICE
        if call == "reduce":
            to = range(1)
        elif call == "reduce_scatter" and not staged:
            to = range(self._rank, self._rank + 1)
        else:  # scattering what is not in registered memory saves nothing
            to = range(self._world_size)
        word = calls.encoded(call, calls.OPS.index(op), dtype, numel, place, layout)
        compiled: tuple[kernel.Operation, ...] = ()
        if self._compiled and whole:
            outputs = 1 if call == "reduce" else self._world_size
            compiled = tuple(
                kernel.reduction("alone", word, op, dtype, numel, half.pieces, outputs)
                for half in self._regions[:HALVES]
            )
        elif self._compiled and not staged:
            outputs = 0 if call == "reduce_scatter" else len(to)
            pieces = self._regions[region_of(place)].pieces
            compiled = (kernel.reduction("together", word, op, dtype, numel, pieces, outputs),)
        return Plan(word, operator, to, whole, shares(numel, self._world_size)[self._rank], compiled)

    def shares_of(self, dtype: torch.dtype, numel: int, place: int) -> kernel.Operation:
        """The mean of a registered tensor, each member's share where it is, however small: in one call of the kernel."""
        word = calls.encoded("reduce_scatter", calls.OPS.index("mean"), dtype, numel, place)
        pieces = self._regions[region_of(place)].pieces
        return kernel.reduction("together", word, "mean", dtype, numel, pieces, 0)

    def _compiled_share(
        self, op: ReduceOp, dtype: torch.dtype, region: int, numel: int, to: range
    ) -> kernel.Operation:
        return kernel.reduction("together", 0, op, dtype, numel, self._regions[region].pieces, len(to))

    def _whole(self, dtype: torch.dtype, half: int, numel: int) -> tuple[Tensor, ...]:
        return self._regions[half].views(numel, dtype)

    def _operator(self, op: ReduceOp, dtype: torch.dtype) -> Reduction:
        return Reduction(op, dtype, self._world_size)

    def _share(self, reduction: Reduction, region: int, numel: int, to: range) -> list[Chunk]:
        members = self._regions[region].views(numel, reduction.dtype)
        return [
            Chunk(
                parts=tuple(member[chunk] for member in members),
                out=members[0][chunk],
                copies=tuple(members[rank][chunk] for rank in to if rank != 0),
            )
            for chunk in reduction.chunks(*shares(numel, self._world_size)[self._rank])
        ]


def region_of(place: int) -> int:
    """Index of a registered buffer's region: staging memory comes first."""
    return HALVES + place - 1
