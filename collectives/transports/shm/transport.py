"""The ``ip`` primitive: collectives among processes of one host through shared memory, without a copy through the kernel.

There are three algorithms:

- Two-shot, for registered buffers: barrier; each member reduces its share over all buffers, chunk by chunk, and writes the
  result to every buffer; barrier. Each member reads and writes as many bytes as one memcpy of the tensor.
- Staged, for other tensors: they pass through staging memory in pieces (``staging.py``). A member reduces its share of a
  piece, copies the previous piece out and the next one in; one barrier per piece.
- One-shot, for small tensors: all are staged; each member then reduces all of them into its own tensor; one barrier.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives.closing import ClosesOnExit
from collectives.errors import CommunicatorError
from collectives.rendezvous import Member
from collectives.shared_words import unsupported_reason
from collectives.transports import calls
from collectives.transports.base import ReduceOp, TransportGroup, combine
from collectives.transports.calls import ON_DEVICE, ON_HOST
from collectives.transports.shm.kernel import (
    KernelBarrier,
    Operation,
    all_members_have_kernel,
    announce_kernel,
    library,
)
from collectives.transports.shm.memory import NUM_STAGING_BUFFERS, Region, Segment, page_aligned
from collectives.transports.shm.prepared_reductions import PreparedReduction, PreparedReductions, region_of
from collectives.transports.shm.staging import Staging, pieces
from collectives.transports.shm.waiting import Barrier

_MOST_BUFFERS = ON_DEVICE - 1
_MAPPED = "mapped"
"""Published by a member that mapped the first member's memory; otherwise it publishes the reason."""


def connect(group: TransportGroup) -> SharedMemoryTransport | str:
    """Map the first member's memory, or return which members cannot.

    A process may open another's memory only if the kernel lets it trace that process: not if it belongs to another user,
    or to another PID namespace.
    """
    if reason := unsupported_reason():
        return reason
    segment, refusals = map_first_members_segment(group)
    if segment is not None and not refusals:
        return SharedMemoryTransport(segment, group.members, group.rank, group.timeout_s, group.check)
    if segment is not None:
        segment.close()
    return f"members cannot share memory: {'; '.join(refusals)}; run them as one user in one PID namespace"


def map_first_members_segment(group: TransportGroup) -> tuple[Segment | None, list[str]]:
    """The first member's memory (None if this member cannot map it), and all members' refusals, equal on all."""
    members, rank, segment = group.members, group.rank, None
    try:
        if rank == 0:
            segment = Segment.host(len(members))
            group.publish(group.key, segment.endpoint)
        else:
            segment, refusal = _attach(group.published(members[0], group.key), group)
            group.publish(f"{group.key} mapped by {rank}", refusal or _MAPPED)
        answers = [
            group.published(member, f"{group.key} mapped by {other}")
            for other, member in enumerate(members)
            if other > 0
        ]
    except BaseException:
        if segment is not None:
            segment.close()
        raise
    return segment, [answer for answer in answers if answer != _MAPPED]


def _attach(endpoint: str, group: TransportGroup) -> tuple[Segment | None, str]:
    """The first member's memory; or None and the reason why this process cannot map it."""
    try:
        return Segment.attach(endpoint, len(group.members), group.rank), ""
    except CommunicatorError as error:
        if not isinstance(error.__cause__, OSError):  # of another version or size
            raise
        who = f"rank {group.members[group.rank].rank} (pid {os.getpid()}, user {os.geteuid()})"
        return None, f"{who} {error.detail}"


class SharedMemoryTransport(ClosesOnExit):
    """One member of a group on one host."""

    def __init__(
        self,
        segment: Segment,
        members: Sequence[Member],
        rank: int,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Wait until every member mapped the segment. ``rank`` is this process's index in ``members``.

        ``check`` is called during waits; it may raise CommunicatorError. A missing member may be alive and have left,
        because of the loss of a process that is not in ``members``.

        Raises:
            CommunicatorError: a member did not come within ``timeout_s``, or died.
            ValueError: a group of one, which has nothing to exchange.
        """
        if len(members) < 2:
            raise ValueError("shared memory needs at least two members")
        self.rank = rank
        self.world_size = len(members)
        self._member = members[rank]
        self._segment = segment
        self._staging = Staging(segment.staging_buffers, rank)
        self._regions: list[Region] = list(segment.staging_buffers)
        self._numbers: dict[int, int] = {}
        self._ready: dict[tuple[str, str, int, int, torch.dtype, int], PreparedReduction] = {}
        """Two-shot operations by registered tensor. Preparing one takes as long as reducing 100 KB."""
        self._prepared = PreparedReductions(self._regions, self.world_size, rank, compiled=False)
        self._lock = threading.RLock()
        """Held during operations: memory is released only between them."""
        announce_kernel(segment.words, rank)
        self._barrier = Barrier(segment.words, segment.address, members, rank, timeout_s, check)
        self._arrive(calls.encode_call("connect"))
        self._kernel: KernelBarrier | None = None
        program = library()
        if program is not None and all_members_have_kernel(segment.words, self.world_size):
            self._barrier = self._kernel = KernelBarrier(self._barrier, program)
            self._prepared = PreparedReductions(self._regions, self.world_size, rank, compiled=True)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place, on every member."""
        self._reduce("all_reduce", tensor, op, layout)

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum", layout: int = 0) -> None:
        """Reduce in place on rank 0; what the others' tensors then hold is unspecified."""
        self._reduce("reduce", tensor, op, layout)

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce in place this member's share, [begin, end) by ``shares``; the rest is unspecified.

        Only registered memory gains by it: of other tensors all is reduced.
        """
        return self._reduce("reduce_scatter", tensor, op).share

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        with self._lock:
            flat = _flat(tensor.contiguous())
            place = self._place("all_gather", flat)
            word = calls.encode_call("all_gather", 0, flat.dtype, flat.numel(), place)
            gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
            rows = gathered.view(self.world_size, -1)
            if place in (ON_HOST, ON_DEVICE):
                for piece in pieces(flat.numel(), flat.element_size()):
                    staging_buffer = self._staging.next_buffer()
                    self._staging.put(flat, piece, staging_buffer)
                    self._staging.synchronize(flat)
                    self._arrive(word)
                    for rank in range(self.world_size):
                        self._staging.take(rows[rank], piece, staging_buffer, rank)
                    self._staging.synchronize(flat)
            else:
                self._arrive(word)
                for row, theirs in zip(rows, self._views(place, flat), strict=True):
                    row.copy_(theirs)
                self._arrive(word)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0, layout: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        with self._lock:
            place, flat = self._place("broadcast", tensor), _flat(tensor)
            word = calls.encode_call("broadcast", source, flat.dtype, flat.numel(), place, layout)
            if place in (ON_HOST, ON_DEVICE):
                for piece in pieces(flat.numel(), flat.element_size()):
                    staging_buffer = self._staging.next_buffer()
                    if self.rank == source:
                        self._staging.put(flat, piece, staging_buffer)
                        self._staging.synchronize(flat)
                    self._arrive(word)
                    if self.rank != source:
                        self._staging.take(flat, piece, staging_buffer, source)
                        self._staging.synchronize(flat)
            else:
                self._arrive(word)
                if self.rank != source:
                    flat.copy_(self._views(place, flat)[source])
                self._arrive(word)

    def barrier(self) -> None:
        """Wait until every member is here."""
        with self._lock:
            self._arrive(calls.encode_call("barrier"))

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed registered memory, (numel,), reduced without copies. All members call it alike, in the same order.

        Views that begin at its start count as it. It stays valid while referenced; after ``close`` it is private memory.

        Raises:
            CommunicatorError: there is no memory for it, or a member asked for something else.
            ValueError: all buffer numbers are in use.
        """
        if len(self._regions) == NUM_STAGING_BUFFERS + _MOST_BUFFERS:
            raise ValueError(f"there are {_MOST_BUFFERS} buffers already; use views of larger ones")
        with self._lock:
            region = self._map(numel, dtype)
            self._regions.append(region)
            own = region.views(numel, dtype)[self.rank]
            self._numbers[own.data_ptr()] = len(self._regions) - NUM_STAGING_BUFFERS
            return own

    def close(self) -> None:
        """Leave the group: members that wait for this one get an error. Safe to call twice.

        From another thread it interrupts: an operation in progress raises within 50 ms.
        """
        self._barrier.leave()
        with self._lock:
            self._staging.close()
            self._numbers.clear()
            self._ready.clear()
            self._regions.clear()
            self._prepared.clear()
            self._segment.close()

    def _map(self, numel: int, dtype: torch.dtype) -> Region:
        """Map the next region, with room for (numel,) of each member. All call it alike."""
        if numel < 0:
            raise ValueError(f"memory cannot have {numel} elements")
        piece_bytes = page_aligned(numel * dtype.itemsize)
        try:
            self._barrier.check_open("buffer")
            if self.rank == 0:  # if it fails, this member leaves, and so the others fail too
                self._segment.reserve(piece_bytes)
            self._arrive(calls.encode_call("buffer", 0, dtype, numel))
            return self._segment.map_region(piece_bytes, self.rank)
        except OSError as error:
            self.close()
            size = f"{self.world_size * piece_bytes / 2**20:.1f} MiB"
            raise CommunicatorError(
                "buffer", self._member.rank, "nobody", 0.0, f"cannot map {size} of shared memory: {error}"
            ) from error

    def _arrive(self, word: int) -> None:
        """A barrier. Closes the transport if it fails."""
        try:
            self._barrier.arrive(word)
        except BaseException:  # Ctrl-C, too: the others may be in the middle of it
            self.close()
            raise

    def _place(self, call: str, tensor: Tensor) -> int:
        """Location of a tensor: ON_HOST, ON_DEVICE, or the number of its registered buffer."""
        self._barrier.check_open(call)
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor of shape {tuple(tensor.shape)} is not contiguous")
        if tensor.is_cpu:
            return self._numbers.get(tensor.data_ptr(), ON_HOST)
        self._staging.pin(tensor)
        return ON_DEVICE

    def _reduce(self, call: str, tensor: Tensor, op: ReduceOp, layout: int = 0) -> PreparedReduction:
        with self._lock:
            key = (call, op, tensor.data_ptr(), tensor.numel(), tensor.dtype, layout)
            ready = self._ready.get(key)
            if ready is not None and self._kernel is not None and tensor.is_contiguous():
                self._run(self._kernel, ready.compiled[0])
                return ready
            place = self._place(call, tensor)
            prepared = self._prepared.reduction(call, op, tensor.dtype, tensor.numel(), place, layout)
            if prepared.compiled and not prepared.one_shot:
                self._ready[key] = prepared
            if self._kernel is not None and prepared.compiled:
                operation = prepared.compiled[self._staging.next_buffer() if prepared.one_shot else 0]
                self._run(self._kernel, operation, tensor.data_ptr())
            elif prepared.one_shot:
                self._reduce_one_shot(prepared, _flat(tensor))
            elif place in (ON_HOST, ON_DEVICE):
                self._reduce_shares_staged(prepared, _flat(tensor))
            else:
                self._arrive(prepared.word)
                self._reduce_share(prepared, region_of(place), tensor.numel())
                self._arrive(prepared.word)
        return prepared

    def _run(self, kernel: KernelBarrier, operation: Operation, own: int = 0) -> None:
        """A whole operation in one call. Closes the transport if it fails."""
        try:
            kernel.run(operation, own)
        except BaseException:
            self.close()
            raise

    def _reduce_one_shot(self, prepared: PreparedReduction, flat: Tensor) -> None:
        """Every member stages its tensor; each receiver then reduces all of them into its own tensor."""
        staging_buffer = self._staging.next_buffer()
        self._staging.put(flat, (0, flat.numel()), staging_buffer)
        self._arrive(prepared.word)
        if self.rank in prepared.receivers:
            combine(self._prepared.staged_views(flat.dtype, staging_buffer, flat.numel()), flat, prepared.op)

    def _reduce_shares_staged(self, prepared: PreparedReduction, flat: Tensor) -> None:
        """Reduce piece by piece, with one barrier each: the previous and the next piece use the other staging buffer."""
        staging, takes = self._staging, self.rank in prepared.receivers
        queue = pieces(flat.numel(), flat.element_size())
        staging_buffer = staging.next_buffer()
        staging.put(flat, queue[0], staging_buffer)
        staging.synchronize(flat)
        for index, (begin, end) in enumerate(queue):
            self._arrive(prepared.word)  # this piece is staged, and the previous one is reduced
            if index and takes:
                staging.take(flat, queue[index - 1], 1 - staging_buffer, self.rank)
            if index + 1 < len(queue):
                staging.put(flat, queue[index + 1], staging.next_buffer())
            self._reduce_share(prepared, staging_buffer, end - begin)
            staging.synchronize(flat)
            staging_buffer = 1 - staging_buffer
        self._arrive(prepared.word)
        if takes:
            staging.take(flat, queue[-1], 1 - staging_buffer, self.rank)
            staging.synchronize(flat)

    def _reduce_share(self, prepared: PreparedReduction, region: int, numel: int) -> None:
        """Reduce this member's share of the first elements of a region, and write it to the receivers' parts."""
        key = (prepared.op, prepared.dtype, region, numel, prepared.receivers)
        if self._kernel is not None:
            self._kernel.reduce_share(self._prepared.compiled_share(*key))
            return
        for parts, out, copies in self._prepared.share(*key):
            combine(parts, out, prepared.op)
            for copy in copies:
                copy.copy_(out)

    def _views(self, place: int, tensor: Tensor) -> tuple[Tensor, ...]:
        """Every member's tensor in a registered buffer."""
        return self._regions[region_of(place)].views(tensor.numel(), tensor.dtype)


def _flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor with one dimension, outside of autograd."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)
