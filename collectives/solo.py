"""A group of one: every operation is already complete."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives.barrier_progress import BarrierProgress
from collectives.communicator import Tensors, WorkHandle
from collectives.transports.base import CompiledOperations, ReduceOp


class SoloCommunicator:
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

    def barrier_progress(self) -> BarrierProgress | None:
        """None: there is nobody to wait for."""
        return None

    def send(self, tensor: Tensor, to: int) -> WorkHandle:
        """Refuse: there is nobody else."""
        raise ValueError(f"to={to}: this member is alone")

    def recv(self, source: int) -> Tensor:
        """Refuse: there is nobody else."""
        raise ValueError(f"source={source}: this member is alone")

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Plain memory."""
        return torch.zeros(numel, dtype=dtype)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """None: there is nobody to share with."""
        return None

    def compiled(self, tensor: Tensor) -> CompiledOperations | None:
        """None: nothing has to be done."""
        return None

    def group(self, ranks: Sequence[int]) -> SoloCommunicator | None:
        """A group of the one, or of nobody."""
        return SoloCommunicator(self.generation) if list(ranks) == [0] else None

    def close(self) -> None:
        """Nothing to leave."""

    def __repr__(self) -> str:
        return "rank 0 of 1"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Done:
    """The handle of an operation that had nothing to do."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None
