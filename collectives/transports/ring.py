"""Transport over one of torch's process groups: rings by NCCL (``nccl.py``), or by Gloo on a CPU."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.errors import CommunicatorError, MismatchedCallError
from collectives.limits import poll_until_done
from collectives.rendezvous import Member, other_members
from collectives.transports import calls
from collectives.transports.base import ReduceOp, ReusedMemory, shares


class GroupTransport(ABC):
    """Shared by the transports over one of torch's process groups: comparing the calls, time limits, closing.

    A separate process group: torch's default group stays untouched.
    """

    _group: Any
    """A connected ``dist.Backend``; None once it is closed."""

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        *,
        device: torch.device,
        timeout_s: float,
        check: Callable[[float], None],
    ) -> None:
        """Of tensors on ``device``. ``rank`` counts within ``members``.

        ``check(waited_s)`` is called during waits; it may raise CommunicatorError if a member is lost or gave up.
        """
        self.rank = rank
        self.world_size = len(members)
        self._members = members
        self._me = members[rank].rank
        self._awaited = other_members(members, rank)
        self._others = ", ".join(map(str, self._awaited))
        self._device, self._timeout_s, self._check = device, timeout_s, check
        self._broken: str | None = None
        self._num_operations = 0
        self._began_s = 0.0
        """Start of the current or last operation."""

    def barrier(self) -> None:
        """Wait until every member has arrived: comparing the calls is a barrier."""
        self._check_same_call("barrier")

    def close(self) -> None:
        """Leave: members that wait for this one get an error, by their time limit at the latest. Safe to call twice."""
        self._broken = self._broken or "this communicator is closed"
        last, self._group = [self._group], None
        if last[0] is not None:
            self._leave(last)

    @abstractmethod
    def _leave(self, last: list[Any]) -> None:
        """Close the connections of the group in this list, which is the last reference to it."""

    @abstractmethod
    def _await(self, works: Sequence[dist.Work], begin: float) -> None:
        """Wait for all parts of an operation that began at ``begin``.

        Raises:
            TimeoutError, RuntimeError: it failed or took too long; CommunicatorError: a member was lost.
        """

    def _check_same_call(
        self, call: str, tensor: Tensor | None = None, detail: int = 0, layout: int = 0
    ) -> None:
        """Compare all members' calls before the group sees a size: with different ones NCCL and Gloo mix data or hang.

        Raises:
            CommunicatorError: on all members, if one called something else; the transport is closed then.
        """
        self._num_operations += 1
        self._began_s = time.monotonic()
        kind = (torch.uint8, 0) if tensor is None else (tensor.dtype, tensor.numel())
        word = calls.encode_call(call, detail, *kind, layout=layout)
        own = calls.signature(word, self._num_operations).to(self._device)
        gathered = torch.empty((self.world_size, len(own)), dtype=torch.uint8, device=self._device)
        self._run(call, lambda group: [group._allgather_base(gathered.view(-1), own)])
        try:
            calls.refuse_difference(gathered, self.rank, self._members)
        except MismatchedCallError as error:
            self._broken = f"an earlier {call} failed: {error.detail}"
            self.close()
            raise

    def _run(self, operation: str, start: Callable[[Any], Sequence[dist.Work]]) -> None:
        """Start an operation and wait for it within the time limit.

        Raises:
            CommunicatorError: it failed, took too long, or a member was lost; the transport is closed then.
        """
        group = self._group
        if group is None:
            raise CommunicatorError(operation, self._me, "nobody", 0.0, str(self._broken))
        begin = time.monotonic()
        try:
            self._await(start(group), begin)
        except (RuntimeError, TimeoutError) as error:
            del group  # ``close`` drops the last reference
            waited_s = time.monotonic() - begin
            detail = self._broken or (str(error).splitlines() or [repr(error)])[0]
            self._broken = f"an earlier {operation} failed: {detail}"
            self.close()
            if isinstance(error, CommunicatorError):
                raise
            failed = CommunicatorError(operation, self._me, self._others, waited_s, detail)
            failed.awaited = self._awaited
            raise failed from error


class RingTransport(GroupTransport):
    """Operations of a process group.

    Each element is summed in one place and copied to the others, so results are bitwise equal on all members. The order
    of the sum is the ring's: the same from run to run on one machine, but not rank order with 3 members or more.
    bfloat16 is sent as float32 and rounded once. NCCL and Gloo may lose a NaN in a maximum, so a mask of NaNs is reduced
    too. Operations return when the group has finished; a mean's division on a GPU is queued on the current stream.
    """

    def __init__(
        self,
        group: Any,
        members: Sequence[Member],
        rank: int,
        *,
        device: torch.device,
        timeout_s: float,
        check: Callable[[float], None],
    ) -> None:
        """Use a connected ``dist.Backend``; the other arguments as of ``GroupTransport``."""
        super().__init__(members, rank, device=device, timeout_s=timeout_s, check=check)
        self._group = group
        self._wide = ReusedMemory(device)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place, on every member."""
        self._reduce("all_reduce", tensor, op, lambda group, part, how: [group.allreduce(part, how)], layout)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        self._reduce("reduce", tensor, op, lambda group, part, how: [group.reduce(part, 0, how)], layout)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share, [begin, end) by ``shares``; the rest is unspecified.

        One reduction to each member: shares differ in length, which NCCL's own reduce-scatter does not take.
        """
        bounds = shares(tensor.numel(), self.world_size)

        def start(group: Any, part: Tensor, how: Any) -> list[dist.Work]:
            return [
                group.reduce(part[begin:end], root, how)
                for root, (begin, end) in enumerate(bounds)
                if begin < end
            ]

        self._reduce("reduce_scatter", tensor, op, start)
        return bounds[self.rank]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        self._check_same_call("all_gather", tensor)
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        own = tensor.detach().contiguous().view(-1)
        if own.numel():
            self._run("all_gather", lambda group: [group._allgather_base(gathered.view(-1), own)])
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        self._check_same_call("broadcast", tensor, source, layout)
        values = tensor.detach()
        if values.numel():
            self._run("broadcast", lambda group: [group.broadcast(values, source)])

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed plain memory, (numel,): the group reads and writes any tensor of its device in place."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def _leave(self, last: list[Any]) -> None:
        """The connections close with the group."""

    def _reduce(
        self,
        operation: str,
        tensor: Tensor,
        op: ReduceOp,
        start: Callable[[Any, Tensor, Any], list[dist.Work]],
        layout: int = 0,
    ) -> None:
        """Reduce through ``start(group, part, how)``, which is right for sums and for maxima without NaN."""
        self._check_same_call(operation, tensor, calls.OPS.index(op), layout)
        if not tensor.numel():
            return
        tensor = tensor.detach()
        values = self._widened(tensor)
        if op == "max":
            nans = torch.isnan(values).to(torch.uint8)  # a maximum may lose NaNs: reduce their mask too
            self._run(
                operation,
                lambda group: [
                    *start(group, values, dist.ReduceOp.MAX),
                    *start(group, nans, dist.ReduceOp.MAX),
                ],
            )
            if values.is_floating_point():
                values.masked_fill_(nans.bool(), math.nan)
        else:
            self._run(operation, lambda group: start(group, values, dist.ReduceOp.SUM))
        if op == "mean":
            values.div_(self.world_size)
        if values is not tensor:
            tensor.copy_(values)

    def _widened(self, tensor: Tensor) -> Tensor:
        """The tensor itself; for bfloat16 a float32 copy in reused memory."""
        if tensor.dtype != torch.bfloat16:
            return tensor
        return self._wide.view(tensor.numel(), torch.float32).copy_(tensor)

    def _await(self, works: Sequence[dist.Work], begin: float) -> None:
        """As of ``GroupTransport``."""
        for work in works:
            left_s = self._timeout_s - (time.monotonic() - begin)
            poll_until_done(work.is_completed, left_s, partial(self._check_open, begin))
            work.wait()  # raises the work's error, if any

    def _check_open(self, begin: float) -> None:
        """End the wait if a member is lost, or if this transport was closed by another thread."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        self._check(time.monotonic() - begin)
