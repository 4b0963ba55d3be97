"""Several tensors as one flat one, so that they travel in one operation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that lie one behind the other in memory, as views of a bucket do; None where they do not.

    Tensors are contiguous and of one dtype and device.
    """
    first, total = tensors[0], sum(tensor.numel() for tensor in tensors)
    storage = first.untyped_storage().data_ptr()
    for before, after in pairwise(tensors):
        gapless = after.storage_offset() == before.storage_offset() + before.numel()
        if not gapless or after.untyped_storage().data_ptr() != storage:
            return None
    return first.detach().as_strided((total,), (1,))


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of ``flat`` in the shapes of ``like``; ``flat`` may be longer."""
    pieces, offset = [], 0
    for tensor in like:
        pieces.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
    return pieces


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))
