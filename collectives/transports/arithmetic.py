"""Elementwise reduction on the host: the reference semantics of all transports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.transports.base import ReduceOp

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
"""Reducible dtypes."""


def combine(parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Reduce parts of equal size in their order: ((p0 + p1) + p2) + ... ``out`` may alias the first part only.

    bfloat16 is summed in float32 and rounded once. A NaN in any part gives NaN, for max too.
    """
    if op == "max":
        total = torch.maximum(parts[0], parts[1], out=out) if len(parts) > 1 else out.copy_(parts[0])
        for part in parts[2:]:
            torch.maximum(total, part, out=total)
        return
    total = out if out.dtype != torch.bfloat16 else torch.empty_like(out, dtype=torch.float32)
    total.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    if op == "mean":
        total.div_(len(parts))
    if total is not out:
        out.copy_(total)
