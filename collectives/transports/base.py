"""What every primitive offers among its own members; the composed communicator runs schedules of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from collectives.barrier_progress import BarrierProgress

ReduceOp = Literal["sum", "mean", "max"]
"""How elements are combined. ``mean`` is for floats: the sum, then divided once by the number of members."""


class Transport(Protocol):
    """One primitive among one set of members. Every member calls the same operations in the same order.

    Tensors are flat and contiguous. Elements are combined in rank order, each by one member, so results are bitwise
    equal on all members and from run to run; bfloat16 is accumulated in float32 and rounded once. NaN and infinity
    travel: a NaN anywhere makes the result NaN, for max too. Operations raise
    ``collectives.errors.CommunicatorError``; after an error the transport is unusable. Before data moves members compare
    what they called (``calls.py``): where that differs, the operation fails on all of them, naming both calls.
    """

    rank: int
    """Among this transport's own members."""
    world_size: int

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place, on every member. ``layout`` as of ``calls.shapes_digest``: members compare it, here and below."""
        ...

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        ...

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share, [begin, end) by ``collectives.shares``; the rest is unspecified."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        ...

    def barrier(self) -> None:
        """Wait until every member is here."""
        ...

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory, (numel,), on which operations need no copy in or out. All members ask alike, in the same order.

        Views that begin at its start and hold the same dtype count as it. Freed when the transport is closed.
        """
        ...

    def close(self) -> None:
        """Leave the group: members that wait for this one get an error. Safe to call twice.

        From another thread it interrupts an operation that is running, which raises.
        """
        ...


class CompiledOperations(Protocol):
    """What another compiled program needs, to take part in operations in the middle of its work.

    It calls ``int run(void *member, const void *operation)``, which returns 0 when the operation is complete. Else the wait
    is long, or something is wrong: it then leaves the operation to Python and goes on after it.
    """

    run: int
    """These are addresses, valid until the communicator is closed."""
    member: int
    reduce_scatter: int
    """Of the tensor that was given, its mean."""
    barrier: int

    def drive_program(self, program: Callable[[], int | None]) -> None:
        """Call a program until it returns None, and complete the operations whose addresses it returns; of 0: none.

        Raises:
            CommunicatorError: as of any operation.
        """
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """A transport whose members can have memory in common, and operations on it that other programs take part in."""

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory (numel,) that all members read and write. All members ask alike, in the same order.

        ``close`` lets go of it; it lives on while the caller keeps it.

        Raises:
            CommunicatorError: there is no memory for it, or a member asked for something else.
        """
        ...

    def compiled(self, tensor: Tensor) -> CompiledOperations | None:
        """For a tensor in registered memory. None, for all members, where they have no compiled kernel."""
        ...


@runtime_checkable
class ExposesBarrierProgress(Protocol):
    """A transport that can tell at the cost of a few loads who waits for this member."""

    def barrier_progress(self) -> BarrierProgress:
        """Who has come to an operation of all."""
        ...
