"""What trainers hold: collectives among all members, of tensors or buckets of them, now or asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from collectives.barrier_progress import BarrierProgress
from collectives.transports.base import CompiledOperations, ReduceOp

Tensors = Tensor | Sequence[Tensor]
"""One tensor, or several that travel in one flat bucket. Contiguous, of one dtype and device."""


class WorkHandle(Protocol):
    """An operation that was started."""

    def done(self) -> bool:
        """Whether it ended, well or not."""
        ...

    def wait(self) -> None:
        """Wait until it ended, and raise what it raised."""
        ...


class Communicator(Protocol):
    """Collectives among ``world_size`` members, which all call them in the same order, and messages between two.

    Tensors are float32, bfloat16, float64 or int64. Results are bitwise equal on all members and from run to run; NaN and
    infinity travel: a NaN anywhere makes the result NaN, for max too. Operations raise
    ``collectives.errors.CommunicatorError`` with what was being done, in which step, who was awaited and for how long;
    after an error the communicator is unusable. What no operation can take raises ValueError before anything travels.
    """

    rank: int
    world_size: int
    generation: int
    """Which forming of the group this is: members that went through a loss together count one further."""

    def all_reduce(self, tensors: Tensors, op: ReduceOp = "sum") -> None:
        """Reduce in place. ``mean`` is for floats: the sum, divided once.

        Several tensors are copied into one bucket and back, unless they are adjacent views of one, as ``buffer`` gives.
        Every member passes them laid out alike.
        """
        ...

    def all_reduce_async(self, tensors: Tensors, op: ReduceOp = "sum") -> WorkHandle:
        """Start to reduce in place and return; the tensors belong to the operation until the handle's ``wait``.

        Operations, asynchronous or not, run in the order in which they were called, one at a time.
        """
        ...

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        ...

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share [begin, end) of the flat tensor, as ``collectives.shares`` says."""
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

    def barrier_progress(self) -> BarrierProgress | None:
        """Who has come to an operation of all; None where no memory shows it, as among members of several hosts."""
        ...

    def send(self, tensor: Tensor, to: int) -> WorkHandle:
        """Start to send a tensor to one member and return; it belongs to the message until the handle's ``wait``.

        The message passes when the receiver is there, and waits for it as long as any operation may. Messages to one
        member arrive in the order in which they were sent; they wait neither for other members nor for collectives.
        Besides what can be reduced, float16, int32, int16, int8, uint8 and bool may be sent.
        """
        ...

    def recv(self, source: int) -> Tensor:
        """Wait for the next message of one member; a new tensor of the type and shape that was sent, on the host."""
        ...

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory (numel,) that is reduced with the fewest copies. All members ask alike, in the same order.

        It is valid until the communicator is closed.
        """
        ...

    def common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Zeroed memory (numel,) that all members read and write; None for all of them where they share none.

        Who writes what, and when, is theirs to agree on. All members ask alike, in the same order. It counts as the host's
        memory until the communicator is closed.
        """
        ...

    def compiled(self, tensor: Tensor) -> CompiledOperations | None:
        """For a program in C that reduces this tensor, which ``buffer`` gave; None for all where operations are Python's.

        What it does counts as one operation.
        """
        ...

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator among some of the members, ranked as listed (the papers' get_group).

        Every member of this communicator calls it with the same ranks; None for those that are not among them. It
        ends with this communicator.
        """
        ...

    def close(self) -> None:
        """Leave the group. Operations that have not begun fail; safe to call twice."""
        ...

    def __enter__(self) -> Self:
        """Use as a context manager: closes on exit."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        ...
