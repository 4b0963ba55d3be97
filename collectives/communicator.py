"""The interface through which GMIs reduce gradients and statistics. Transports implement it."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Protocol, Self

from torch import Tensor

ReduceOp = Literal["sum", "mean", "max"]


class Communicator(Protocol):
    """Collectives among ``world_size`` members. Every member calls the same operations in the same order.

    Results are bitwise equal on all members. Operations raise ``collectives.errors.CommunicatorError`` with what was
    awaited, from whom and for how long; after an error the communicator is unusable.
    """

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place. ``tensor`` is contiguous; float32, float64 or int64 (``mean`` not for int64)."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        ...

    def barrier(self) -> None:
        """Wait until every member is here."""
        ...

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        ...

    def __enter__(self) -> Self:
        """Use as a context manager: closes on exit."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        ...
