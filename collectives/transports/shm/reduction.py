"""Reduction by torch: combines the members' parts in rank order, chunk by chunk, without allocating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from collectives.transports.base import ReduceOp

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
