"""Collectives among threads of one process: the reference that the other transports are tested against."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives.communicator import ReduceOp
from collectives.errors import CommunicatorError


class InProcessGroup:
    """What the members of one group share. Make one, then a communicator for each rank in a thread of its own."""

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.deposits: list[Tensor] = [torch.empty(0)] * world_size
        self._arrivals = [0] * world_size
        self._left = [False] * world_size
        self._changed = threading.Condition()

    def communicator(self, rank: int) -> InProcessCommunicator:
        """One member's view."""
        return InProcessCommunicator(self, rank)

    def arrive(self, operation: str, rank: int) -> None:
        """Wait until every member arrived as often as this one.

        Raises:
            CommunicatorError: a member left before, or came too late.
        """
        begin = time.monotonic()
        with self._changed:
            self._arrivals[rank] += 1
            mine = self._arrivals[rank]
            self._changed.notify_all()

            def late() -> list[int]:
                return [other for other, count in enumerate(self._arrivals) if count < mine]

            self._changed.wait_for(
                lambda: not late() or any(self._left[other] for other in late()), self.timeout_s
            )
            absent = late()
            gone = [other for other in absent if self._left[other]]
        if absent:
            detail = f"rank {gone[0]} left the group" if gone else "the time limit passed"
            raise CommunicatorError(operation, rank, f"ranks {absent}", time.monotonic() - begin, detail)

    def leave(self, rank: int) -> None:
        """Say that a member will not come again."""
        with self._changed:
            self._left[rank] = True
            self._changed.notify_all()


class InProcessCommunicator:
    """One member. Sums run in rank order, on every member alike, so that results are deterministic."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place: ((t0 + t1) + t2) + ..."""
        parts = self._exchange("all_reduce", tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            if op == "max":
                torch.maximum(total, part, out=total)
            else:
                total += part
        tensor.copy_(total)
        if op == "mean":
            tensor.div_(self.world_size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        return torch.stack(self._exchange("all_gather", tensor))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        tensor.copy_(self._exchange("broadcast", tensor)[source])

    def barrier(self) -> None:
        """Wait until every member is here."""
        self._group.arrive("barrier", self.rank)

    def close(self) -> None:
        """Leave: members that wait for this one get an error. Safe to call twice."""
        self._group.leave(self.rank)

    def _exchange(self, operation: str, tensor: Tensor) -> list[Tensor]:
        """Every member's tensor as it was when deposited, by rank."""
        self._group.deposits[self.rank] = tensor.detach().clone()
        self._group.arrive(operation, self.rank)
        parts = list(self._group.deposits)
        self._group.arrive(operation, self.rank)  # nobody deposits anew before all have read
        return parts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
