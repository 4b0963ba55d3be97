"""Collectives among processes of one host through a piece of shared memory, without a system call on the fast path.

Every member copies its tensor into its slot, all wait, each reduces its share of the elements over all slots in rank
order, all wait, every member copies the result out. Two barriers and three passes over the data, against the four
passes and the kernel's socket copies of a ring over loopback.

A barrier is one counter per member, in a cache line of its own that only this member writes. Publishing data by a
plain store to a counter is ordered on x86-64 (stores become visible in program order), which is why other processors
are left to Gloo. Beside its counter a member says what it was called for; all compare this after the barrier.

Nobody reads a slot after an operation's last barrier, so the next operation may write to it at once. The result of an
all_reduce is read after its last barrier: it is written only after another, for which its readers have to come.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives.communicator import ReduceOp
from collectives.errors import CommunicatorError
from collectives.rendezvous import Member

_CACHE_LINE_BYTES = 64
_WORDS_PER_LINE = _CACHE_LINE_BYTES // 8
SLOT_BYTES = 2**20
"""Room for one member's piece of a tensor; larger tensors pass in several. Fits the cache of most processors."""
_ALIGN_ELEMENTS = 16
"""Shares begin on cache lines, so that two members never write to one."""

_CALLS = ("connect", "barrier", "all_gather", "broadcast", "all_reduce")
_OPS: tuple[ReduceOp, ...] = ("sum", "mean", "max")
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}

_SPINS = 2000
"""Looks at a counter before the processor is offered to others; some 0.1 to 0.2 ms."""
_YIELDS = 200
_FIRST_SLEEP_S = 20e-6
_LAST_SLEEP_S = 1e-3
_LIVENESS_INTERVAL_S = 0.05


def is_supported() -> bool:
    """Whether this host orders plain stores and offers anonymous shared files."""
    return platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


class Segment:
    """The memory: a line of arrivals and tags and a line of goodbyes per member; then a slot each and one for results.

    It is an anonymous file: it has no name that could be left behind, and goes with the last process that maps it.
    Members of the same user open it through rank 0's descriptor in /proc.
    """

    def __init__(self, descriptor: int, name: str, world_size: int, slot_bytes: int) -> None:
        self.name = name
        self.slot_bytes = slot_bytes
        memory = mmap.mmap(descriptor, _segment_bytes(world_size, slot_bytes))
        self._descriptor: int | None = descriptor
        self.words = memoryview(memory).cast("Q")
        data_begin = 2 * world_size * _CACHE_LINE_BYTES
        self.slots = [
            torch.frombuffer(
                memory, dtype=torch.uint8, count=slot_bytes, offset=data_begin + index * slot_bytes
            )
            for index in range(world_size + 1)
        ]
        self.result = self.slots.pop()

    @classmethod
    def create(cls, world_size: int, slot_bytes: int = SLOT_BYTES) -> Self:
        """Make a zeroed segment.

        Raises:
            CommunicatorError: there is no memory for it.
        """
        size = _segment_bytes(world_size, slot_bytes)
        descriptor = os.memfd_create("rayagi-collective", os.MFD_CLOEXEC)
        try:
            # Reserved now: a later write without memory behind it would end the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            return cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", world_size, slot_bytes)
        except OSError as error:
            os.close(descriptor)
            raise CommunicatorError(
                "connect", 0, "nobody", 0.0, f"no room for {size / 2**20:.1f} MiB of shared memory: {error}"
            ) from error

    @classmethod
    def attach(cls, name: str, world_size: int, rank: int, slot_bytes: int = SLOT_BYTES) -> Self:
        """Map the segment that rank 0 made with the same sizes.

        Raises:
            CommunicatorError: it is not there any more, belongs to another user, or has another size.
        """
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(descriptor, name, world_size, slot_bytes)
            except BaseException:
                os.close(descriptor)
                raise
        except (OSError, ValueError) as error:
            raise CommunicatorError(
                "connect", rank, "rank 0's segment", 0.0, f"cannot map {name}: {error}"
            ) from error

    def close_descriptor(self) -> None:
        """Close the file once everyone mapped it; the memory stays. Safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _segment_bytes(world_size: int, slot_bytes: int) -> int:
    return 2 * world_size * _CACHE_LINE_BYTES + (world_size + 1) * slot_bytes


class SharedMemoryCommunicator:
    """One member of a group on one host. Tensors larger than a slot pass in pieces."""

    def __init__(self, segment: Segment, members: Sequence[Member], rank: int, timeout_s: float) -> None:
        """Wait until every member mapped the segment.

        Raises:
            CommunicatorError: a member did not come within ``timeout_s``, or died.
        """
        self.rank = rank
        self.world_size = len(members)
        self._segment = segment
        self._members = members
        self._timeout_s = timeout_s
        self._arrivals = 0
        self._broken: str | None = None
        self._watch = _Watch([member for member in members if member.rank != rank])
        try:
            self._arrive(_tag("connect"))
        finally:
            segment.close_descriptor()

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place: ((t0 + t1) + t2) + ..., each element by one member, hence bitwise equal on all."""
        tag = _tag("all_reduce", tensor, _OPS.index(op))
        for piece in self._pieces(tensor):
            slots = self._slots(piece)
            result = self._segment.result.view(piece.dtype)[: piece.numel()]
            slots[self.rank].copy_(piece)
            self._arrive(tag)
            begin, end = self._share(piece.numel())
            _reduce([slot[begin:end] for slot in slots], result[begin:end], op)
            self._arrive(tag)
            piece.copy_(result)
        if op == "mean":
            tensor.div_(self.world_size)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor in rank order: (world_size, *tensor.shape)."""
        tag = _tag("all_gather", tensor)
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        own = self._pieces(tensor.detach().contiguous())
        others = [self._pieces(row) for row in gathered]
        for index, piece in enumerate(own):
            slots = self._slots(piece)
            slots[self.rank].copy_(piece)
            self._arrive(tag)
            for rank, slot in enumerate(slots):
                others[rank][index].copy_(slot)
            self._arrive(tag)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite every member's tensor with the source's, in place."""
        tag = _tag("broadcast", tensor, source)
        for piece in self._pieces(tensor):
            shared = self._slots(piece)[source]
            if self.rank == source:
                shared.copy_(piece)
            self._arrive(tag)
            if self.rank != source:
                piece.copy_(shared)
            self._arrive(tag)

    def barrier(self) -> None:
        """Wait until every member is here."""
        self._arrive(_tag("barrier"))

    def close(self) -> None:
        """Say goodbye: members that wait for this one get an error. Safe to call twice."""
        self._segment.words[self._goodbye_word(self.rank)] = 1
        self._broken = self._broken or "this communicator is closed"
        self._watch.close()

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The tensor flat, in pieces that fit a slot; none when it is empty."""
        if not tensor.numel():
            return ()
        return tensor.detach().view(-1).split(self._segment.slot_bytes // tensor.element_size())

    def _slots(self, piece: Tensor) -> list[Tensor]:
        """Every member's slot as room for such a piece, by rank."""
        return [slot.view(piece.dtype)[: piece.numel()] for slot in self._segment.slots]

    def _share(self, size: int) -> tuple[int, int]:
        """The elements that this member reduces: [begin, end), beginning on a cache line."""
        lines = -(-size // _ALIGN_ELEMENTS)
        bounds = [
            min(size, _ALIGN_ELEMENTS * (lines * rank // self.world_size))
            for rank in (self.rank, self.rank + 1)
        ]
        return bounds[0], bounds[1]

    def _arrive(self, tag: int) -> None:
        """Wait until every member arrived as often as this one, and make sure that it did for the same call."""
        if self._broken is not None:
            raise CommunicatorError(_name(tag), self.rank, "nobody", 0.0, self._broken)
        words = self._segment.words
        self._arrivals += 1
        # Two tags by turns: a fast member's next does not overwrite the one that a slow member still has to compare.
        tag_offset = 1 + self._arrivals % 2
        own = self.rank * _WORDS_PER_LINE
        words[own + tag_offset] = tag
        words[own] = self._arrivals
        for member in self._members:
            word = member.rank * _WORDS_PER_LINE
            for _ in range(_SPINS):
                if words[word] >= self._arrivals:
                    break
            else:
                self._await(_name(tag), member, word)
            if words[word + tag_offset] != tag:
                self._refuse(tag, member, words[word + tag_offset])

    def _refuse(self, tag: int, member: Member, other_tag: int) -> None:
        """Two members came for different calls: what they would exchange means nothing."""
        detail = (
            f"rank {self.rank} called {_described(tag)}, and rank {member.rank} {_described(other_tag)}; "
            "every member must call the same operations in the same order"
        )
        self.close()
        self._broken = f"an earlier {_name(tag)} failed: {detail}"
        raise CommunicatorError(_name(tag), self.rank, str(member), 0.0, detail)

    def _await(self, operation: str, member: Member, word: int) -> None:
        """The slow path: give the processor away, look after the member, mind the time."""
        words = self._segment.words
        begin = checked = time.monotonic()
        looks, pause_s = 0, _FIRST_SLEEP_S
        while words[word] < self._arrivals:
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            if now - checked >= _LIVENESS_INTERVAL_S or now - begin >= self._timeout_s:
                checked = now
                self._check(operation, member, word, now - begin)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_SLEEP_S)

    def _check(self, operation: str, member: Member, word: int, waited_s: float) -> None:
        """Raise if a member that has not arrived never will, or the time is up."""
        gone = self._watch.dead_ranks()
        left = [other.rank for other in self._members if self._segment.words[self._goodbye_word(other.rank)]]
        detail = None
        for other in self._members:
            late = self._segment.words[other.rank * _WORDS_PER_LINE] < self._arrivals
            if late and other.rank in gone:
                detail, member = "its process has ended", other
            elif late and other.rank in left:
                detail, member = "it left the group", other
        if detail is None and waited_s >= self._timeout_s and self._segment.words[word] < self._arrivals:
            detail = f"it did not come within {self._timeout_s:.1f} s"
        if detail is not None:
            self.close()
            self._broken = f"an earlier {operation} failed: {member}: {detail}"
            raise CommunicatorError(operation, self.rank, str(member), waited_s, detail)

    def _goodbye_word(self, rank: int) -> int:
        return (self.world_size + rank) * _WORDS_PER_LINE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tag(call: str, tensor: Tensor | None = None, detail: int = 0) -> int:
    """A call in one word of 64 bits: which, its reduction or source, its type and how many elements."""
    head = _CALLS.index(call) << 12 | detail
    if tensor is None:
        return head << 48
    return (head << 8 | _DTYPE_INDEX[tensor.dtype]) << 40 | tensor.numel()


def _name(tag: int) -> str:
    return _CALLS[tag >> 60]


def _described(tag: int) -> str:
    """A tag as text: ``all_reduce(sum) of 7 float32``."""
    name, detail = _name(tag), tag >> 48 & 0xFFF
    if name in ("connect", "barrier"):
        return name
    if name == "all_reduce":
        name = f"all_reduce({_OPS[detail]})"
    elif name == "broadcast":
        name = f"broadcast(source={detail})"
    dtype = str(_DTYPES[tag >> 40 & 0xFF]).removeprefix("torch.")
    return f"{name} of {tag & (1 << 40) - 1} {dtype}"


def _reduce(parts: Sequence[Tensor], out: Tensor, op: ReduceOp) -> None:
    """Reduce parts of equal length in their order."""
    combine = torch.maximum if op == "max" else torch.add
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


class _Watch:
    """Notices when a member's process ends, by a descriptor of the process: an id that is used again cannot deceive it."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._dead: set[int] = set()
        for member in members:
            try:
                descriptor = os.pidfd_open(member.pid)
            except ProcessLookupError:
                self._dead.add(member.rank)
            except OSError:  # a kernel without such descriptors: the time limit alone ends a wait
                continue
            else:
                self._ranks[descriptor] = member.rank
                self._poll.register(descriptor, select.POLLIN)

    def dead_ranks(self) -> set[int]:
        """Members whose process has ended."""
        return self._dead | {self._ranks[descriptor] for descriptor, _ in self._poll.poll(0)}

    def close(self) -> None:
        """Close the descriptors. Safe to call twice."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()
        self._poll = select.poll()
