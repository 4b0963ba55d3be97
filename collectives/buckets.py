"""Buckets: several tensors as one flat tensor, reduced in one operation; and checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor

from collectives.communicator import Tensors
from collectives.transports.base import DTYPES, ReduceOp


def checked(tensors: Tensors, op: ReduceOp) -> list[Tensor]:
    """The tensors as a list, without gradients of their own.

    Raises:
        ValueError: they do not fit one bucket, or the operation is not defined for them.
    """
    listed = [tensor.detach() for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]
    if op not in get_args(ReduceOp):
        raise ValueError(f"op={op!r}: use one of {', '.join(get_args(ReduceOp))}")
    for tensor in listed:
        if tensor.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"a tensor of {tensor.dtype}: members exchange {known}")
        if not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is not contiguous: reduce a copy of it"
            )
        if (tensor.dtype, tensor.device) != (listed[0].dtype, listed[0].device):
            raise ValueError(
                f"tensors of {listed[0].dtype} on {listed[0].device} and {tensor.dtype} on {tensor.device} "
                "do not fit one bucket: reduce them apart"
            )
    if op == "mean" and listed and not listed[0].is_floating_point():
        raise ValueError(f"the mean of {listed[0].dtype} is not one of its values: use 'sum'")
    return listed


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that are adjacent in memory, as the views of a bucket are; None if they are not.

    Tensors are contiguous and of one dtype and device.
    """
    if len(tensors) == 1:
        return tensors[0].view(-1)
    first, total = tensors[0], sum(tensor.numel() for tensor in tensors)
    storage = first.untyped_storage().data_ptr()
    for before, after in pairwise(tensors):
        gapless = after.storage_offset() == before.storage_offset() + before.numel()
        if not gapless or after.untyped_storage().data_ptr() != storage:
            return None
    return first.detach().as_strided((total,), (1,))


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive pieces of ``flat`` in the shapes of ``like``; ``flat`` may be longer."""
    sizes = [tensor.numel() for tensor in like]
    pieces = flat[: sum(sizes)].split(sizes)
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source to its target, in one call."""
    torch._foreach_copy_(list(targets), list(sources))
