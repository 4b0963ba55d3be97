"""Barriers and reductions by ``kernel.c``. It uses the shared words of ``waiting.py``, and some more.

One call does a whole operation without the GIL: arrive, wait, reduce, wait. A wait returns to Python after 50 ms of sleep,
or on a signal. Python then checks whether the other members are alive, as ``waiting.py`` does.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Literal

import torch
from torch import Tensor

from collectives import futex
from collectives.errors import CommunicatorError
from collectives.kernels import Kernel
from collectives.limits import WaitedTime
from collectives.mirrors import Mirrors
from collectives.rendezvous import Member
from collectives.shared_words import WORD_BYTES, SharedWords
from collectives.transports import calls
from collectives.transports.base import ReduceOp
from collectives.transports.shm.memory import CACHE_LINE_BYTES, HEADER_BYTES
from collectives.transports.shm.waiting import ARRIVALS, ASLEEP, BLAMED, CALL, GOODBYE, STRIDE, Barrier

OPERATIONS = Kernel(
    name="operations in shared memory",
    module=__name__,
    reference="collectives.transports.base:combine",
    without="shared memory: reductions without the compiled kernel, which is faster",
    level=logging.WARNING,
)

_SLEEPS, _KERNEL, _WORKED = 4, CACHE_LINE_BYTES // WORD_BYTES + 1, 3 * CACHE_LINE_BYTES // WORD_BYTES + 2
"""Words of a member's slot that ``waiting.py`` does not use."""
_COMPLETE, _TRY_AGAIN, _MISMATCHED, _ABORTED = range(4)
_NOT_BEGUN = 0
"""``next`` of a member between operations: ARRIVE of ``kernel.c``."""
_KINDS = ("barrier_only", "one_shot", "two_shot")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
_SLEEP_NS = 50_000_000
_ABORT_REASON_WAIT_S = 0.1
"""How long after an abort to wait until the member that aborted says why."""
_MOST_MEMBERS = 256
"""MOST_MEMBERS of ``kernel.c``."""


class _MemberState(ctypes.Structure):
    """``struct member``."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("oversubscribed", ctypes.c_int32),
        ("next", ctypes.c_int32),
        ("arrivals", ctypes.c_uint64),
        ("reductions", ctypes.c_uint64),
        ("limit_ns", ctypes.c_int64),
        ("own", ctypes.c_void_p),
    )


class Operation(ctypes.Structure):
    """``struct operation``. It holds addresses: the caller keeps their memory alive."""

    call: int
    _fields_ = (
        ("call", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("operator", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("element_bytes", ctypes.c_int32),
        ("numel", ctypes.c_uint64),
        ("pieces", ctypes.c_void_p),
        ("piece_bytes", ctypes.c_uint64),
    )

    def __init__(self, call: int, *others: int) -> None:
        super().__init__(call, *others)
        self.at = ctypes.pointer(self)
        """Pointer to this struct, made once."""


def _slot_word(name: str) -> str:
    return f"offsetof(struct member_slot, {name}) / {WORD_BYTES}"


_MIRRORS: Mirrors = {
    "struct member": _MemberState,
    "struct operation": Operation,
    "LINE": CACHE_LINE_BYTES,
    "sizeof(struct header)": HEADER_BYTES,
    f"sizeof(struct member_slot) / {WORD_BYTES}": STRIDE,
    _slot_word("arrivals"): ARRIVALS,
    _slot_word("calls"): CALL,
    _slot_word("waiting_py"): ASLEEP,
    _slot_word("sleeps"): _SLEEPS,
    _slot_word("goodbye"): GOODBYE,
    _slot_word("kernel_py"): _KERNEL,
    _slot_word("blamed_py"): BLAMED,
    _slot_word("worked"): _WORKED,
    "MOST_MEMBERS": _MOST_MEMBERS,
    **{name: value for value, name in enumerate(("COMPLETE", "TRY_AGAIN", "MISMATCHED", "ABORTED"))},
    **{kind.upper(): value for value, kind in enumerate(_KINDS)},
    "ARRIVE": _NOT_BEGUN,
}


def reduction(
    kind: Literal["one_shot", "two_shot"],
    call: int,
    op: ReduceOp,
    dtype: torch.dtype,
    numel: int,
    pieces: Sequence[Tensor],
    outputs: int,
) -> Operation:
    """A reduction of the first elements of every member's part of a region.

    one_shot: each member stages its tensor in the region, and reduces all of them into its own tensor; two_shot: each
    member reduces a share, in place. ``pieces``: the members' parts by rank, at equal distances: of staging memory, or
    of a registered buffer. ``outputs``: number of ranks, from 0 on, that get the result; 0: each gets its share.
    """
    begin, second = pieces[0].data_ptr(), pieces[1].data_ptr()
    operator = _DTYPES.index(dtype) * len(calls.OPS) + calls.OPS.index(op)
    return Operation(
        call, _KINDS.index(kind), operator, outputs, dtype.itemsize, numel, begin, second - begin
    )


class KernelBarrier(Barrier):
    """Barrier and reductions of one member by ``kernel.c``: ``run`` does a whole operation in one call."""

    def __init__(self, barrier: Barrier, library: ctypes.CDLL) -> None:
        """Continue with the state of a barrier that all members have just passed."""
        vars(self).update(vars(barrier))
        self._run = library.run
        self._reduce_share = library.reduce_share
        self._abort_operation = library.abort_operation
        size = len(self._members)
        oversubscribed = size > _num_cores(self._members)
        self._state = _MemberState(
            self._address, self._rank, size, oversubscribed, 0, self._count, 0, _SLEEP_NS, None
        )
        self._state_pointer = ctypes.byref(self._state)
        self.barrier_operation = lru_cache(maxsize=4096)(Operation)
        """A barrier alone, by encoded call."""

    def arrive(self, call: int) -> None:
        """As ``Barrier.arrive``."""
        self.run(self.barrier_operation(call))

    def run(self, operation: Operation, own: int = 0) -> None:
        """Take part in an operation of all members. ``own``: address of this member's tensor, for one_shot.

        Raises:
            CommunicatorError: as of ``Barrier.arrive``. What the tensors then hold is unspecified.
        """
        words = self._words  # keeps the memory mapped if another thread closes meanwhile
        if self.broken is not None:
            self.check_open(calls.call_name(operation.call))
        try:
            if own:
                self._state.own = own
            state = self._run(self._state_pointer, operation.at)
            if state != _COMPLETE:
                self._resume(words, operation, state)
        except BaseException as error:  # Ctrl-C: the operation cannot be resumed
            self.broken = (
                self.broken or f"an earlier {calls.call_name(operation.call)} was ended by {error!r}"
            )
            self.leave()
            raise

    def reduce_share(self, operation: Operation) -> None:
        """Reduce this member's share. The caller synchronizes."""
        self._reduce_share(operation.at, self._state.size, self._rank)

    def leave(self) -> None:
        """As ``Barrier.leave``. An operation that this member has begun and not completed is aborted for all."""
        words = self._words
        if len(words) and self._state.next != _NOT_BEGUN:
            self._abort_operation(self._state_pointer)
        super().leave()
        # After the goodbye: a member that stored ``sleeps`` too early to see the goodbye finds the word cleared (kernel.c).
        if len(words):
            for other in self._others:
                words[other + _SLEEPS] = 0
                futex.wake(self._address + (other + _SLEEPS) * WORD_BYTES)

    def _resume(self, words: SharedWords, operation: Operation, state: int) -> None:
        """Repeat the call until the operation is complete. Checks between sleeps whether the other members are alive."""
        waited = WaitedTime()
        while state == _TRY_AGAIN:
            waited_s = waited.look()
            loss = self._loss(words, self._processes.ended(), self._late(words, operation), waited_s)
            elsewhere = None if loss is not None else self._lost_elsewhere(waited_s)
            # A member that left or ended may have done its part before: run once more without sleeping, then abort.
            self._state.limit_ns = _SLEEP_NS if loss is None and elsewhere is None else 0
            state = self._run(self._state_pointer, operation.at)
            if state == _TRY_AGAIN and loss is not None:
                # One compare-and-swap on the header's outcome decides between this abort and another member's completion.
                self._blame(words, loss[0])  # before the others can see the abort
                if self._abort_operation(self._state_pointer):
                    self._fail(operation.call, loss[0], waited_s, loss[1])
                words[self._own + BLAMED] = 0  # it was completed elsewhere: the next run completes it here
            elif state == _TRY_AGAIN and elsewhere is not None and self._abort_operation(self._state_pointer):
                raise elsewhere
        if state == _ABORTED:
            self._fail(operation.call, *self._who_aborted(words, waited))
        if state == _MISMATCHED:
            call_at = CALL + (self._state.arrivals & 1)
            other = next(line for line in self._others if words[line + call_at] != operation.call)
            self._refuse(operation.call, self._members[other // STRIDE], words[other + call_at])

    def _lost_elsewhere(self, waited_s: float) -> CommunicatorError | None:
        """The loss of a process outside of this group, because of which a member may have left; None without one."""
        try:
            self._others_lost(waited_s)
        except CommunicatorError as error:
            return error
        return None

    def _late(self, words: SharedWords, operation: Operation) -> Sequence[int]:
        """Slots of the members that have not arrived; if all have, of those that are still within a chunk."""
        arrivals = self._state.arrivals
        late = [other for other in self._others if words[other + ARRIVALS] < arrivals]
        if not late and operation.kind == _KINDS.index("two_shot"):
            late = [other for other in self._others if words[other + _WORKED] < arrivals]
        return late or self._others

    def _who_aborted(self, words: SharedWords, waited: WaitedTime) -> tuple[Member, float, str]:
        """The member that aborted, or for which the operation was aborted; seconds waited; and the reason."""
        deadline = time.monotonic() + _ABORT_REASON_WAIT_S
        while True:
            waited_s = waited.look()
            loss = self._loss(words, self._processes.ended(), self._others, 0.0)
            if loss is not None:
                return loss[0], waited_s, loss[1]
            if time.monotonic() > deadline:
                return self._members[self._others[0] // STRIDE], waited_s, "a member aborted it"
            os.sched_yield()  # its goodbye follows the abort


@cache
def library() -> ctypes.CDLL | None:
    """The kernel, from the cache or compiled now; None if that fails, which is logged once."""
    return OPERATIONS.made_or_none(_load)


def _load() -> ctypes.CDLL:
    found = OPERATIONS.load(_source(), mirrors=_MIRRORS)
    found.reduce_share.restype = None
    return found


def announce_kernel(words: SharedWords, rank: int) -> None:
    """Write this member's kernel version to its slot, before the group's first barrier."""
    if library() is not None:  # the first barrier's arrival publishes it
        words[rank * STRIDE + _KERNEL] = (
            int.from_bytes(hashlib.sha256(_source().encode()).digest()[:8], "little") | 1
        )


def all_members_have_kernel(words: SharedWords, size: int) -> bool:
    """Whether all members have the same kernel and it takes this many: the same answer on all, after the first barrier."""
    offered = {words[rank * STRIDE + _KERNEL] for rank in range(size)}
    return size <= _MOST_MEMBERS and len(offered) == 1 and offered != {0}


@cache
def _source() -> str:
    return files(__package__).joinpath("kernel.c").read_text(encoding="utf-8")


def _num_cores(members: Sequence[Member]) -> int:
    """Cores on which any of the members may run."""
    cores: set[int] = set()
    for member in members:
        try:
            cores |= os.sched_getaffinity(member.pid)
        except OSError:  # it has just ended
            continue
    return len(cores)
