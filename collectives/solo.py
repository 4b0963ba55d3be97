"""A group of one: every operation is already complete."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import Tensor

from collectives.communicator import ReduceOp


class SoloCommunicator:
    """The communicator of a GMI that trains alone."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Leave the tensor as it is: the sum, mean and maximum of one."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return (1, *tensor.shape), a copy."""
        return tensor.detach().clone().unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Leave the tensor as it is."""

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Nothing to leave."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
