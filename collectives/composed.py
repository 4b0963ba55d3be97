"""Communicator of several members: runs a schedule, with one transport per primitive and group."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from collectives.buckets import adjacent, checked, copy_all, views
from collectives.closing import ClosesOnExit
from collectives.communicator import Communicator, Tensors
from collectives.errors import CommunicatorError, MismatchedCallError
from collectives.objects import all_gather_objects
from collectives.point_to_point import PointToPointChannels
from collectives.queue import OperationQueue, QueuedOperation
from collectives.schedule import CollectiveSchedule, Primitive, Step, ranks_text
from collectives.transports.base import ReduceOp, Transport
from collectives.transports.calls import shapes_digest
from collectives.tuning import ScheduleTuner

if TYPE_CHECKING:  # it imports this module
    from collectives.transport_factory import GroupTransportFactory

_logger = logging.getLogger(__name__)
Result = TypeVar("Result")

_REGISTERING = ("ip", "device")
"""Primitives with registered memory, on which they need no copies."""
_CLOSE_LIMIT_S = 1.0
"""How long ``close`` waits for an interrupted operation."""


class ComposedCommunicator(ClosesOnExit):
    """All-reduces by a schedule. Other operations use one transport among all members."""

    def __init__(
        self,
        rank: int,
        schedule: CollectiveSchedule,
        transport_factory: GroupTransportFactory,
        generation: int = 0,
        reason: str = "it was requested",
        tuner: ScheduleTuner | None = None,
    ) -> None:
        """Connect to the members that this rank shares a group of the schedule with.

        The schedule is the same on all members; ``reason``: why it was chosen; ``tuner``: may replace it during
        training.

        Raises:
            CommunicatorError, RendezvousError: a member is missing or cannot be reached.
        """
        self.rank = rank
        self.world_size = schedule.layout.world_size
        self.generation, self.reason, self._tuner = generation, reason, tuner
        self._transport_factory = transport_factory
        self._broken: str | None = None
        self._queue = OperationQueue(rank)
        self._channels = PointToPointChannels(rank, self.world_size, transport_factory.channel, self._guarded)
        self._groups: list[Communicator] = []
        self._buckets: dict[torch.dtype, Tensor] = {}
        self._transports: dict[tuple[Primitive, tuple[int, ...]], Transport] = {}
        everyone = tuple(range(self.world_size))
        try:
            self._use_schedule(schedule)
            self._group_transport = self._transport(
                "ip" if len(schedule.layout.nodes) == 1 else "net", everyone
            )
        except CommunicatorError as error:
            # Before the release, which closes the failure detector.
            explained_error = transport_factory.with_root_cause(error)
            self._release()
            raise explained_error from error.__cause__
        except BaseException:
            self._release()
            raise

    def all_reduce(self, tensors: Tensors, op: ReduceOp = "sum") -> None:
        """Reduce in place by the schedule."""
        self._call("all_reduce", partial(self._reduce_all, checked(tensors, op), op))

    def all_reduce_async(self, tensors: Tensors, op: ReduceOp = "sum") -> QueuedOperation:
        """Start to reduce in place and return; the tensors belong to the operation until the handle's ``wait``."""
        reduction = partial(self._reduce_all, checked(tensors, op), op)
        return self._queue.start(partial(self._guarded, "all_reduce", reduction))

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        flat = checked(tensor, op)[0].view(-1)
        self._call("reduce", lambda: self._group_transport.reduce(flat, _sum_for_mean(op)))
        if op == "mean" and self.rank == 0:
            flat.div_(self.world_size)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share; returns [begin, end) in the flat tensor."""
        flat = checked(tensor, op)[0].view(-1)
        fused = op if flat.dtype != torch.bfloat16 else _sum_for_mean(op)  # as in _run_schedule
        begin, end = self._call("reduce_scatter", lambda: self._group_transport.reduce_scatter(flat, fused))
        if op != fused:
            flat[begin:end].div_(self.world_size)
        return begin, end

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        own = tensor.detach().contiguous()
        rows = self._call("all_gather", lambda: self._group_transport.all_gather(own.view(-1)))
        return rows.view(self.world_size, *tensor.shape)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        if not 0 <= source < self.world_size:
            raise ValueError(f"source={source}: the ranks are 0 to {self.world_size - 1}")
        flat = checked(tensor, "sum")[0].view(-1)
        self._call("broadcast", lambda: self._group_transport.broadcast(flat, source))

    def barrier(self) -> None:
        """Wait until every member has arrived."""
        self._call("barrier", self._group_transport.barrier)

    def send(self, tensor: Tensor, to: int) -> QueuedOperation:
        """Start to send to one member and return; the tensor belongs to the message until the handle's ``wait``."""
        self._refuse_if_broken("send")
        return self._channels.send(tensor, to)

    def recv(self, source: int) -> Tensor:
        """Wait for the next message of one member; returns its tensor, on the host."""
        return self._channels.recv(source)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed registered memory (numel,) of the schedule's first step by ``ip`` or ``device``."""
        return self._call("buffer", lambda: self._registered(numel, dtype))

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator among some of the members, ranked as listed. Every member calls it with the same ranks."""
        listed = tuple(ranks)
        if not listed or len(set(listed)) < len(listed) or not set(listed) <= set(range(self.world_size)):
            raise ValueError(f"ranks={listed}: list different ranks from 0 to {self.world_size - 1}")
        made = self._call("group", partial(self._group, listed))
        if made is not None:
            self._groups.append(made)
        return made

    def close(self) -> None:
        """Leave the group. Operations that have not begun fail; safe to call twice."""
        self._broken = self._broken or "this communicator is closed"
        for group in self._groups:
            group.close()
        self._channels.close(_CLOSE_LIMIT_S)
        self._queue.close(interrupt=self._release, limit_s=_CLOSE_LIMIT_S)

    def __repr__(self) -> str:
        kinds = {primitive: type(made).__name__ for (primitive, _), made in self._transports.items()}
        by = ", ".join(f"{primitive} by {kind}" for primitive, kind in kinds.items())
        layout = f"{self.schedule.composition} on {self.schedule.layout}"
        return f"rank {self.rank} of {self.world_size}: {layout} ({self.reason}); {by}"

    def _group(self, ranks: tuple[int, ...]) -> Communicator | None:
        """Make a group after all members have compared their ranks."""
        requested = all_gather_objects([*ranks], self._group_transport)
        for rank, theirs in enumerate(requested):
            if theirs != [*ranks]:
                text = f"rank {self.rank} called group({[*ranks]}), and rank {rank} group({theirs})"
                raise MismatchedCallError("group", self.rank, f"rank {rank}", 0.0, text)
        return self._transport_factory.group(ranks)

    def _transport(self, primitive: Primitive, ranks: tuple[int, ...]) -> Transport:
        """The transport for this primitive and group, connected at first use."""
        key = (primitive, ranks)
        if key not in self._transports:
            self._transports[key] = self._transport_factory.transport(primitive, ranks)
        return self._transports[key]

    def _use_schedule(self, schedule: CollectiveSchedule) -> None:
        """Run this schedule from now on. Buffers that were handed out stay valid.

        Raises:
            CommunicatorError, RendezvousError: a member is missing or cannot be reached.
        """
        self.schedule = schedule
        self._steps = [
            _LocalStep(number, step, group, self._transport(step.primitive, group))
            for number, step, group in schedule.steps_of(self.rank)
        ]
        self._buckets.clear()

    def _buffer_transport(self) -> Transport | None:
        """The transport that owns buffers: of the first step with registered memory; None if this rank skips it.

        The groups of a step are disjoint, so the members of a group agree on it.
        """
        steps = self.schedule.steps
        first = next((number for number, step in enumerate(steps) if step.primitive in _REGISTERING), None)
        if first is None:
            return self._group_transport
        return next((own.transport for own in self._steps if own.number == first), None)

    def _reduce_all(self, tensors: list[Tensor], op: ReduceOp) -> None:
        """All-reduce the tensors as one bucket."""
        if not tensors:
            return
        flat, layout = adjacent(tensors), shapes_digest(tensors)
        if flat is not None:
            self._run_tuned(flat, op, layout)
            return
        bucket = self._bucket(sum(tensor.numel() for tensor in tensors), tensors[0])
        pieces = views(bucket, tensors)
        copy_all(tensors, pieces)
        self._run_tuned(bucket, op, layout)
        copy_all(pieces, tensors)

    def _run_tuned(self, flat: Tensor, op: ReduceOp, layout: int) -> None:
        """Run the schedule, and let the tuner replace it for the next reduction if another costs less."""
        tuner = self._tuner
        if tuner is None:
            self._run_schedule(flat, op, layout)
            return
        begin = tuner.begin(flat)
        self._run_schedule(flat, op, layout)
        better = tuner.end(flat, begin, partial(self._group_transport.all_reduce, op="max"))
        if better is not None:
            self.reason = tuner.plan.reason
            self._use_schedule(better)
            if self.rank == 0:
                _logger.info(
                    "%d bytes are reduced by %s from now on: %s",
                    tuner.plan.nbytes,
                    better.composition,
                    self.reason,
                )

    def _run_schedule(self, flat: Tensor, op: ReduceOp, layout: int) -> None:
        # With one step the transport divides a mean itself. Not in bfloat16: it would divide before it rounds, and so the
        # result would depend on the number of steps.
        fused = len(self.schedule.steps) == 1 and flat.dtype != torch.bfloat16
        # The steps of this rank's groups, in the schedule's order; a step without a group of this rank is not among them.
        for own in self._steps:
            try:
                run_step(own.step, own.transport, flat, op if fused else _sum_for_mean(op), layout)
            except CommunicatorError as error:
                error.step = f"step {own.number + 1} of {len(self.schedule.steps)}, {own}"
                raise
        # mean = sum / world size: every rank divides the same sum, so the results stay bitwise equal.
        if op == "mean" and not fused:
            flat.div_(self.world_size)

    def _bucket(self, numel: int, like: Tensor) -> Tensor:
        """Memory that all lists of tensors reuse; it at least doubles when it must grow."""
        bucket = self._buckets.get(like.dtype)
        if bucket is None or bucket.numel() < numel:
            size = max(numel, 2 * bucket.numel() if bucket is not None else 0)
            bucket = self._buckets[like.dtype] = self._registered(size, like.dtype)
        return bucket[:numel]

    def _registered(self, numel: int, dtype: torch.dtype) -> Tensor:
        home = self._buffer_transport()
        return torch.zeros(numel, dtype=dtype) if home is None else home.buffer(numel, dtype)

    def _call(self, operation: str, do: Callable[[], Result]) -> Result:
        """Run an operation of the whole group when its turn in the queue comes."""
        return self._queue.call(partial(self._guarded, operation, do))

    def _guarded(self, operation: str, do: Callable[[], Result]) -> Result:
        self._refuse_if_broken(operation)
        try:
            return do()
        except CommunicatorError as error:
            raise self._failed(error, operation) from error

    def _refuse_if_broken(self, operation: str) -> None:
        if self._broken is not None:
            raise CommunicatorError(operation, self.rank, "nobody", 0.0, self._broken)

    def _failed(self, error: CommunicatorError, operation: str) -> CommunicatorError:
        """Turn a transport's error into this communicator's, and leave all groups, so that no member waits for this one."""
        kind = MismatchedCallError if isinstance(error, MismatchedCallError) else CommunicatorError
        located = kind(operation, self.rank, error.waiting_for, error.waited_s, error.detail, error.step)
        located.awaited = error.awaited
        explained_error = self._transport_factory.with_root_cause(located)
        self._broken = (
            f"an earlier {operation} failed: {explained_error.waiting_for}: {explained_error.detail}"
        )
        self._release()
        return explained_error

    def _release(self) -> None:
        """Leave every transport. Safe to call twice."""
        self._channels.release()
        for transport in self._transports.values():
            transport.close()
        self._transport_factory.close()


def run_step(step: Step, transport: Transport, flat: Tensor, op: ReduceOp, layout: int = 0) -> None:
    """Take part in a step over the transport of one of its groups."""
    if step.op == "all_reduce":
        transport.all_reduce(flat, op, layout)
    elif step.op == "reduce":
        transport.reduce(flat, op, layout)
    else:
        transport.broadcast(flat, 0, layout)


@dataclass(frozen=True, slots=True)
class _LocalStep:
    """A step of the schedule, as this rank takes part in it."""

    number: int
    step: Step
    group: tuple[int, ...]
    transport: Transport

    def __str__(self) -> str:
        return f"{self.step.op} by {self.step.primitive} among {ranks_text(self.group)}"


def _sum_for_mean(op: ReduceOp) -> ReduceOp:
    """The transports' operation: a mean is a sum that is divided once, at the end."""
    return "sum" if op == "mean" else op
