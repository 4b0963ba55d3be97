"""Communicator interface of the trainers: collectives on tensors or buckets of them, synchronous or asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from collectives.transports.base import ReduceOp

Tensors = Tensor | Sequence[Tensor]
"""One tensor, or several that are reduced in one flat bucket. Contiguous, of one dtype and device."""


class WorkHandle(Protocol):
    """An operation that was started."""

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""

    def wait(self) -> None:
        """Wait until it has ended, and raise what it raised."""


class Communicator(Protocol):
    """Collectives among ``world_size`` members, which call them in the same order, and point-to-point messages.

    Tensors are float32, bfloat16, float64 or int64. Results are bitwise equal on all members and from run to run. NaN and
    infinity propagate; NaN for max too. Operations raise ``collectives.errors.CommunicatorError`` with the operation, its
    step, the awaited members and the seconds waited; after an error the communicator is unusable. Invalid arguments raise
    ValueError before any data moves.
    """

    rank: int
    world_size: int
    generation: int
    """Of the group: counted up when its members connect anew after a loss."""

    def all_reduce(self, tensors: Tensors, op: ReduceOp = "sum") -> None:
        """Reduce in place. ``mean`` is for floats: the sum, divided once.

        Several tensors are copied into one bucket and back, unless they are adjacent views of one, as ``buffer`` gives.
        Every member passes them laid out alike.
        """

    def all_reduce_async(self, tensors: Tensors, op: ReduceOp = "sum") -> WorkHandle:
        """Start to reduce in place and return; the tensors belong to the operation until the handle's ``wait``.

        Operations, asynchronous or not, run in the order in which they were called, one at a time.
        """

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share [begin, end) of the flat tensor: ``transports.base.shares``."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""

    def barrier(self) -> None:
        """Wait until every member has arrived."""

    def send(self, tensor: Tensor, to: int) -> WorkHandle:
        """Start to send a tensor to one member and return; it belongs to the message until the handle's ``wait``.

        The message is transferred when the receiver calls ``recv``; the sender waits for it within the time limit of any
        operation. Messages to one member arrive in order; they wait neither for other members nor for collectives.
        Besides the reducible dtypes, float16, int32, int16, int8, uint8 and bool may be sent.
        """

    def recv(self, source: int) -> Tensor:
        """Wait for the next message of one member; returns a new tensor of the sent dtype and shape, on the host."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory (numel,) that is reduced with the fewest copies. All members call it alike, in the same order.

        It is valid until the communicator is closed.
        """

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator among some of the members, ranked as listed (the papers' get_group).

        Every member of this communicator calls it with the same ranks; None for those that are not among them. It
        ends with this communicator.
        """

    def close(self) -> None:
        """Leave the group. Operations that have not begun fail; safe to call twice."""

    def __enter__(self) -> Self:
        """Use as a context manager: closes on exit."""

    def __exit__(self, *error: object) -> None:
        """Close."""
