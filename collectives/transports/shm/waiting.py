"""Barrier in shared memory, in Python: without locks, and without system calls if members arrive at the same time.

A member writes only its own words: on one cache line its arrivals, the encoded call and the member on whose counter it
sleeps; on another, written once, its goodbye and the member that it blames.

1. Arrive: store the call, then increment the own counter; wake members that sleep on it.
2. Wait for each other counter: poll, then yield the core, then sleep on that counter (futex) for at most 50 ms at a time.
3. After a sleep without success check the members' processes by pidfd, which is safe against reused process ids.
4. Compare the calls.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from collectives import futex
from collectives.errors import CommunicatorError, MismatchedCallError
from collectives.limits import WaitedTime
from collectives.process_watcher import ProcessWatcher
from collectives.rendezvous import Member
from collectives.shared_words import WORD_BYTES, SharedWords
from collectives.transports import calls
from collectives.transports.shm.memory import CACHE_LINE_BYTES, LINES_PER_MEMBER

STRIDE = LINES_PER_MEMBER * CACHE_LINE_BYTES // WORD_BYTES
ARRIVALS, CALL, ASLEEP, GOODBYE = 0, 1, 3, CACHE_LINE_BYTES // WORD_BYTES
BLAMED = GOODBYE + 3
"""Indices of a member's words. CALL: two words by turns, so that a fast member's next call does not overwrite the current
one. ASLEEP: 1 + the member on whose counter it sleeps; 0: awake. GOODBYE: 0, or the first operation that it does not
complete. BLAMED: 1 + the member because of which it left; 0: none."""

_SPINS = 10
"""Polls of a counter before the first yield."""
_YIELD_S = 200e-6
"""How long to yield the core between polls before sleeping. A yield costs 1 us per poll on an uncontended core. A futex
wake-up costs sleeper and waker some 30 us each on a virtual machine, and delays the next barrier too."""
_SLEEP_S = 0.05
_NO_WORDS: SharedWords = memoryview(b"").cast("Q")


class Barrier:
    """The barrier of a group, as one member uses it."""

    def __init__(
        self,
        words: SharedWords,
        address: int,
        members: Sequence[Member],
        rank: int,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """``check(waited_s)`` is called during waits; it may raise if a process outside of ``members`` is lost."""
        self.broken: str | None = None
        """Why no further operation is possible; None: it is."""
        self._words, self._address, self._members, self._rank = words, address, members, rank
        self._timeout_s = timeout_s
        self._others_lost = check
        self._count = self._num_complete = 0
        self._own = rank * STRIDE
        self._others = [index * STRIDE for index in range(len(members)) if index != rank]
        self._fence = threading.Lock()
        self._processes = ProcessWatcher(member.pid for index, member in enumerate(members) if index != rank)

    def arrive(self, call: int) -> None:
        """Wait until every member arrived as often as this one, and compare the calls.

        Raises:
            CommunicatorError: a member called something else, died, left, or did not arrive within the time limit.
        """
        words = self._words
        if self.broken is not None:
            self.check_open(calls.call_name(call))
        # 1. Arrive. The counter is stored after the call, so who reads the counter also sees the call.
        self._count = count = self._count + 1
        call_at = CALL + (count & 1)
        words[self._own + call_at] = call
        words[self._own] = count
        # 2. Wake a sleeper, behind a store-load fence: without it the loads of ASLEEP could precede the store, and miss a
        # sleeper that missed the store. A lock is a locked instruction, a fence on x86-64; elsewhere SharedWords has fences.
        with self._fence:
            pass
        awaited = self._rank + 1
        for other in self._others:
            if words[other + ASLEEP] == awaited:
                futex.wake(self._address + self._own * WORD_BYTES)
                break  # one call wakes all that sleep on this counter
        # 3. Wait for every other counter, then compare that member's call, which its counter published.
        for other in self._others:
            if words[other] < count:
                self._wait(words, other, count, call)
            if words[other + call_at] != call:
                self._refuse(call, self._members[other // STRIDE], words[other + call_at])
        # 4. A member that arrived and then failed, say by a mismatch, left without completing this operation.
        for other in self._others:
            if 0 < words[other + GOODBYE] <= count:
                member, reason = self._left(words, other)
                self._fail(call, member, 0.0, reason)
        self._num_complete = count

    def check_open(self, operation: str) -> None:
        """Raise CommunicatorError if an earlier operation failed, or this side is closed."""
        if self.broken is not None:
            raise CommunicatorError(operation, self._me.rank, "nobody", 0.0, self.broken)

    def leave(self) -> None:
        """Store the goodbye, and wake the members that wait for this one. Safe to call twice."""
        self.broken = self.broken or "this communicator is closed"
        words, self._words = self._words, _NO_WORDS
        if len(words):
            # After BLAMED (``_fail``): who reads the goodbye also sees whom this member blames.
            words[self._own + GOODBYE] = self._num_complete + 1
            futex.wake(self._address + self._own * WORD_BYTES)
        self._processes.close()

    @property
    def _me(self) -> Member:
        return self._members[self._rank]

    def _wait(self, words: SharedWords, other: int, count: int, call: int) -> None:
        """Wait until the counter at word ``other`` has reached ``count``: poll, then yield, then sleep."""
        for _ in range(_SPINS):
            if words[other] >= count:
                return
        begin = time.monotonic()
        while time.monotonic() - begin < _YIELD_S:
            os.sched_yield()
            if words[other] >= count:
                return
        # The waker stores its counter, then reads ASLEEP; this member stores ASLEEP, then Linux compares the counter with
        # ``arrivals``, behind a full fence in the system call. So either the comparison fails and ``sleep`` returns at once,
        # or the waker sees ASLEEP and wakes.
        words[self._own + ASLEEP] = other // STRIDE + 1
        waited = WaitedTime()
        while (arrivals := words[other]) < count:
            futex.sleep(self._address + other * WORD_BYTES, arrivals, _SLEEP_S)
            if words[other] < count:
                self._check(words, count, call, waited.look())
        words[self._own + ASLEEP] = 0

    def _check(self, words: SharedWords, count: int, call: int, waited_s: float) -> None:
        """Raise if a member that has not arrived is gone, the time limit has passed, or this barrier was closed."""
        gone = self._processes.ended()
        late = [line for line in self._others if words[line] < count]
        loss = self._loss(words, gone, late, waited_s) if late else None
        if loss is not None:
            self._fail(call, loss[0], waited_s, loss[1])
        if late:
            self._others_lost(waited_s)

    def _loss(
        self, words: SharedWords, gone: set[int], awaited: Sequence[int], waited_s: float
    ) -> tuple[Member, str] | None:
        """An awaited member (given by slot) that will not arrive, and why; None if all of them still may."""
        for line in awaited:
            member = self._members[line // STRIDE]
            if words[line + GOODBYE]:
                return self._left(words, line)
            if member.pid in gone:
                return member, "its process has ended"
        first = self._members[awaited[0] // STRIDE]
        if self.broken is not None:
            return first, self.broken
        if waited_s >= self._timeout_s:
            return first, f"it did not come within {self._timeout_s:.1f} s"
        return None

    def _left(self, words: SharedWords, line: int) -> tuple[Member, str]:
        """The member that caused a goodbye (the one it timed out on, else itself), and what happened."""
        member, blamed = self._members[line // STRIDE], words[line + BLAMED] - 1
        if blamed < 0:
            return member, "it left the group"
        if blamed == self._rank:
            return member, "it left the group after it had timed out waiting for this process"
        return self._members[blamed], f"{member} timed out waiting for it, and left the group"

    def _blame(self, words: SharedWords, member: Member) -> None:
        """Publish because of which member this one will leave."""
        words[self._own + BLAMED] = 1 + list(self._members).index(member)

    def _refuse(self, call: int, member: Member, other_call: int) -> None:
        """Fail because two members made different calls."""
        different = calls.mismatch_message(self._me.rank, call, member.rank, other_call)
        self._fail(call, member, 0.0, different, MismatchedCallError)

    def _fail(
        self,
        call: int,
        member: Member,
        waited_s: float,
        detail: str,
        kind: type[CommunicatorError] = CommunicatorError,
    ) -> None:
        self.broken = self.broken or f"an earlier {calls.call_name(call)} failed: {member}: {detail}"
        if kind is CommunicatorError and len(self._words):
            self._blame(self._words, member)
        self.leave()
        raise kind(calls.call_name(call), self._me.rank, str(member), waited_s, detail)
