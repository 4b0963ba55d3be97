"""Collectives among threads of one process: the reference that the other transports are tested against."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from collectives.errors import CommunicatorError, MismatchedCallError
from collectives.transports import calls
from collectives.transports.base import ReduceOp, combine, shares


class InProcessGroup:
    """Shared state of the members of one group. Create one, then the transport of each rank in its own thread."""

    def __init__(self, world_size: int, timeout_s: float = 60.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.deposits: list[Tensor] = [torch.empty(0)] * world_size
        self.result = torch.empty(0)
        self._present: dict[int, int] = {}
        """Encoded calls of the members that have arrived, by rank."""
        self._mismatch: dict[int, int] | None = None
        self._left: set[int] = set()
        self._arrivals = 0
        self._changed = threading.Condition()

    def transport(self, rank: int) -> InProcessTransport:
        """One member's view."""
        return InProcessTransport(self, rank)

    def arrive(self, word: int, rank: int) -> None:
        """Wait until every member arrived as often as this one, and compare the calls.

        Raises:
            CommunicatorError: a member left before, did not arrive in time, or called something else.
        """
        begin = time.monotonic()
        with self._changed:
            barrier = self._arrivals
            self._present[rank] = word
            if not self._left and len(self._present) == self.world_size:
                if len({*self._present.values()}) > 1:
                    self._mismatch = dict(self._present)
                    self._left.update(self._present)
                else:
                    self._arrivals += 1
                    self._present.clear()
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._arrivals > barrier or self._left, self.timeout_s)
            if self._arrivals > barrier:
                return
            if self._mismatch is not None and self._mismatch.get(rank) == word:
                other = next(r for r, theirs in sorted(self._mismatch.items()) if theirs != word)
                different = calls.mismatch_message(rank, word, other, self._mismatch[other])
                raise MismatchedCallError(calls.call_name(word), rank, f"rank {other}", 0.0, different)
            absent = sorted({*range(self.world_size)} - self._present.keys())
            gone = sorted(self._left)
            self._left.add(rank)  # a late member must not complete the operation that this one gave up
            self._changed.notify_all()
        detail = f"rank {gone[0]} left the group" if gone else "the time limit passed"
        waited_s = time.monotonic() - begin
        raise CommunicatorError(calls.call_name(word), rank, f"ranks {absent}", waited_s, detail)

    def leave(self, rank: int) -> None:
        """Record that a member has left."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()


class InProcessTransport:
    """Transport of one member. It writes NaN to unspecified contents, so that a schedule that relies on them fails."""

    def __init__(self, group: InProcessGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self._group = group

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place: ((t0 + t1) + t2) + ..."""
        word, _, _ = self._reduced("all_reduce", tensor, op, layout)
        tensor.copy_(self._group.result)
        self._group.arrive(word, self.rank)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0."""
        word, _, _ = self._reduced("reduce", tensor, op, layout)
        if self.rank == 0:
            tensor.copy_(self._group.result)
        else:
            _fill_with_nan(tensor)
        self._group.arrive(word, self.rank)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share; returns [begin, end)."""
        word, begin, end = self._reduced("reduce_scatter", tensor, op)
        _fill_with_nan(tensor)
        tensor[begin:end] = self._group.result[begin:end]
        self._group.arrive(word, self.rank)
        return begin, end

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        word = calls.encode_call("all_gather", 0, tensor.dtype, tensor.numel())
        self._deposit(word, tensor.detach())
        gathered = torch.stack(self._group.deposits)
        self._group.arrive(word, self.rank)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        word = calls.encode_call("broadcast", source, tensor.dtype, tensor.numel(), layout=layout)
        self._deposit(word, tensor)
        if self.rank != source:
            tensor.copy_(self._group.deposits[source])
        self._group.arrive(word, self.rank)

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        self._group.arrive(calls.encode_call("barrier"), self.rank)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Plain memory: threads share it anyway."""
        return torch.zeros(numel, dtype=dtype)

    def close(self) -> None:
        """Leave: members that wait for this one get an error. Safe to call twice."""
        self._group.leave(self.rank)

    def _deposit(self, word: int, tensor: Tensor) -> None:
        """Let the others read a tensor until the next barrier."""
        self._group.deposits[self.rank] = tensor
        if self.rank == 0:
            self._group.result = torch.empty_like(tensor)
        self._group.arrive(word, self.rank)

    def _reduced(self, call: str, tensor: Tensor, op: ReduceOp, layout: int = 0) -> tuple[int, int, int]:
        """Every member reduces its share into the group's result; returns the call's word and the own share."""
        word = calls.encode_call(call, calls.OPS.index(op), tensor.dtype, tensor.numel(), layout=layout)
        self._deposit(word, tensor)
        begin, end = shares(tensor.numel(), self.world_size)[self.rank]
        combine([part[begin:end] for part in self._group.deposits], self._group.result[begin:end], op)
        self._group.arrive(word, self.rank)
        return word, begin, end


def _fill_with_nan(tensor: Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
