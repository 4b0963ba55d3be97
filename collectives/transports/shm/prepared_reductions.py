"""Caches of everything that a reduction needs besides its tensor: encoded call, views, chunks, kernel arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.shares import shares
from collectives.transports import calls
from collectives.transports.base import ReduceOp
from collectives.transports.calls import ON_DEVICE, ON_HOST
from collectives.transports.shm import kernel
from collectives.transports.shm.memory import NUM_STAGING_BUFFERS, Region

REDUCIBLE = (torch.float32, torch.float64, torch.int64, torch.bfloat16)
_CHUNK_BYTES = 2**17 - 64
"""Of the accumulator. Chunks of four members fit a second-level cache of 1 MiB. A chunk has fewer elements than torch splits
over threads, which would cost more than they save and compete with other members' threads."""
_ALIGN_ELEMENTS = 16


class Reduction:
    """One operator for one dtype: combines parts of at most ``chunk`` elements. bfloat16 is summed in float32."""

    def __init__(self, op: ReduceOp, dtype: torch.dtype, world_size: int) -> None:
        """
        Raises:
            ValueError: unknown operator, unsupported dtype, or the mean of integers.
        """
        if op not in ("sum", "mean", "max"):
            raise ValueError(f"op is {op!r}; it can be sum, mean or max")
        if dtype not in REDUCIBLE:
            names = ", ".join(str(reducible).removeprefix("torch.") for reducible in REDUCIBLE)
            raise ValueError(f"cannot reduce {dtype}; convert to one of {names}")
        if op == "mean" and dtype == torch.int64:
            raise ValueError("the mean of int64 is not an integer; use op='sum', or convert to float64")
        self.op, self.dtype = op, dtype
        self._combine = torch.maximum if op == "max" else torch.add
        self._wide: tuple[Tensor, Tensor] | None = None
        accumulated = dtype
        if dtype == torch.bfloat16 and op != "max":
            accumulated = torch.float32
        self.chunk = _CHUNK_BYTES // accumulated.itemsize // _ALIGN_ELEMENTS * _ALIGN_ELEMENTS
        if accumulated != dtype:
            self._wide = (torch.empty(self.chunk), torch.empty(self.chunk))
        self._divisor = torch.tensor(world_size, dtype=accumulated) if op == "mean" else None

    def __call__(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Combine ``parts`` (at least two) into ``out``, which may alias the first part only."""
        if self._wide is not None:
            self._combine_wide(parts, out, *self._wide)
            return
        self._combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self._combine(out, part, out=out)
        if self._divisor is not None:
            torch.div(out, self._divisor, out=out)

    def _combine_wide(self, parts: Sequence[Tensor], out: Tensor, total: Tensor, part_wide: Tensor) -> None:
        total, part_wide = total[: out.numel()], part_wide[: out.numel()]
        total.copy_(parts[0])
        for part in parts[1:]:
            part_wide.copy_(part)
            self._combine(total, part_wide, out=total)
        if self._divisor is not None:
            torch.div(total, self._divisor, out=total)
        out.copy_(total)

    def chunks(self, begin: int, end: int) -> Iterator[slice]:
        """Split [begin, end) into slices of at most ``chunk`` elements."""
        for start in range(begin, end, self.chunk):
            yield slice(start, min(start + self.chunk, end))


_SMALL_BYTES = 2**15
"""Largest registered tensor for one-shot: below it, a barrier costs more than reducing everything on every member. Other
tensors also save two copies, so their limit is a chunk."""


class Chunk(NamedTuple):
    """Inputs and output of one ``Reduction`` call, and the views that the result is copied to."""

    parts: tuple[Tensor, ...]
    out: Tensor
    copies: tuple[Tensor, ...]


class PreparedReduction(NamedTuple):
    """A reduction of tensors of one type, size and place."""

    word: int
    reduction: Reduction
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
        """This member's chunks of the first elements of a region."""
        self.compiled_share = lru_cache(maxsize=256)(self._compiled_share)
        """The same for ``KernelBarrier.reduce_share``, by operator, dtype, region, number of elements, receivers."""
        self.staged_views = lru_cache(maxsize=256)(self._staged_views)
        """Every member's first elements in a staging buffer, by dtype, buffer, number of elements."""
        self._operators = lru_cache(maxsize=32)(self._operator)

    def clear(self) -> None:
        """Drop all cached views."""
        for kept in (self.reduction, self.share, self.compiled_share, self.staged_views, self._operators):
            kept.cache_clear()

    def _reduction(
        self, call: str, op: ReduceOp, dtype: torch.dtype, numel: int, place: int, layout: int = 0
    ) -> PreparedReduction:
        operator = self._operators(op, dtype)
        staged = place in (ON_HOST, ON_DEVICE)
        small = operator.chunk if place == ON_HOST else _SMALL_BYTES // dtype.itemsize
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
            word, operator, receivers, one_shot, shares(numel, self._world_size)[self._rank], compiled
        )

    def _compiled_share(
        self, op: ReduceOp, dtype: torch.dtype, region: int, numel: int, receivers: range
    ) -> kernel.Operation:
        return kernel.reduction("two_shot", 0, op, dtype, numel, self._regions[region].pieces, len(receivers))

    def _staged_views(self, dtype: torch.dtype, staging_buffer: int, numel: int) -> tuple[Tensor, ...]:
        return self._regions[staging_buffer].views(numel, dtype)

    def _operator(self, op: ReduceOp, dtype: torch.dtype) -> Reduction:
        return Reduction(op, dtype, self._world_size)

    def _share(self, reduction: Reduction, region: int, numel: int, receivers: range) -> list[Chunk]:
        members = self._regions[region].views(numel, reduction.dtype)
        return [
            Chunk(
                parts=tuple(member[chunk] for member in members),
                out=members[0][chunk],
                copies=tuple(members[rank][chunk] for rank in receivers if rank != 0),
            )
            for chunk in reduction.chunks(*shares(numel, self._world_size)[self._rank])
        ]


def region_of(place: int) -> int:
    """Region index of a registered buffer: the staging buffers come first."""
    return NUM_STAGING_BUFFERS + place - 1
