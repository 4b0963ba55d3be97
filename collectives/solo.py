"""Communicator of a single member: every operation is complete at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.closing import ClosesOnExit
from collectives.communicator import Tensors, WorkHandle
from collectives.transports.base import ReduceOp


class SoloCommunicator(ClosesOnExit):
    """The communicator of a GMI that trains alone."""

    rank = 0
    world_size = 1

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation

    def all_reduce(self, tensors: Tensors, op: ReduceOp = "sum") -> None:
        """Leave the tensors as they are: the sum, mean and maximum of one."""

    def all_reduce_async(self, tensors: Tensors, op: ReduceOp = "sum") -> WorkHandle:
        """Leave the tensors as they are."""
        return _Done()

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Leave the tensor as it is."""

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Leave the tensor as it is: the only share is all of it."""
        return 0, tensor.numel()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return (1, *tensor.shape), a copy."""
        return tensor.detach().clone().unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Leave the tensor as it is."""

    def barrier(self) -> None:
        """Return at once."""

    def send(self, tensor: Tensor, to: int) -> WorkHandle:
        """Raise: there is no other member."""
        raise ValueError(f"to={to}: this group has no other member")

    def recv(self, source: int) -> Tensor:
        """Raise: there is no other member."""
        raise ValueError(f"source={source}: this group has no other member")

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(numel, dtype=dtype)

    def group(self, ranks: Sequence[int]) -> SoloCommunicator | None:
        """A group of this member; None for any other ranks."""
        return SoloCommunicator(self.generation) if list(ranks) == [0] else None

    def close(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "rank 0 of 1"


class _Done:
    """Handle of a completed operation."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None
