"""Barriers on shared words: no lock, no system call while members come together, and no burnt core while they do not.

A member has a cache line of its own that only it writes: how often it arrived, what for, and for whom it sleeps. It waits
with a short spin, then offers its processor to others, then sleeps on the other's counter (a futex) for at most 50 ms at
a time. Whoever arrives wakes those that sleep on its counter. After each sleep that brought nothing, the members'
processes are looked at through descriptors (pidfd), which an id that is used again cannot deceive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from collectives import futex
from collectives.errors import CommunicatorError, MismatchedCallError
from collectives.process_watcher import ProcessWatcher
from collectives.rendezvous import Member
from collectives.shared_words import WORD_BYTES, SharedWords
from collectives.transports import calls
from collectives.transports.shm.memory import CACHE_LINE_BYTES, LINES_PER_MEMBER

STRIDE = LINES_PER_MEMBER * CACHE_LINE_BYTES // WORD_BYTES
ARRIVALS, CALL, ASLEEP, GOODBYE = 0, 1, 3, CACHE_LINE_BYTES // WORD_BYTES
BLAMED = GOODBYE + 3
"""A member's words. Its goodbye is 0, or the number of the first operation that it does not complete. Two for calls, by
turns: a fast member's next does not overwrite the one that a slow one compares. Whom it blames for leaving: 1 + its place
among the members, 0 for nobody."""

_SPINS = 10
"""Looks at a counter before anything else: what a member needs that is about to store it."""
_OFFER_S = 200e-6
"""How long the processor is then offered to others between looks. To whoever has it alone that costs a microsecond a
look, and a member that waits for its turn on the same core gets it. To wake a sleeper costs it and its waker some 30
microseconds each on a virtual machine: members that sleep too early make each other late, and then each other sleep."""
_SLEEP_S = 0.05
_NO_WORDS: SharedWords = memoryview(b"").cast("Q")


class Barrier:
    """One member's side of the group's barriers."""

    def __init__(
        self,
        words: SharedWords,
        address: int,
        members: Sequence[Member],
        rank: int,
        timeout_s: float,
        check: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """``check`` is called during waits, with their seconds so far; where others than these are lost, it may raise."""
        self.broken: str | None = None
        """Why no further operation is possible."""
        self._words = words
        self._address = address
        self._members = members
        self._rank = rank
        self._timeout_s = timeout_s
        self._others_lost = check
        self._count = self._num_complete = 0
        self._own = rank * STRIDE
        self._others = [index * STRIDE for index in range(len(members)) if index != rank]
        self._fence = threading.Lock()
        self._processes = ProcessWatcher(member.pid for index, member in enumerate(members) if index != rank)

    def arrive(self, call: int) -> None:
        """Wait until every member arrived as often as this one, and make sure that it did for the same call.

        Raises:
            CommunicatorError: a member called something else, died, left, or did not come within the time limit.
        """
        words = self._words
        if self.broken is not None:
            self.check_open(calls.call_name(call))
        self._count = count = self._count + 1
        call_at = CALL + (count & 1)
        words[self._own + call_at] = call
        words[self._own] = count
        # A processor may look before its own store is visible, and would miss a sleeper that missed the store. Taking
        # a lock is a locked instruction, which x86-64 completes after all stores before it; elsewhere words see to it.
        with self._fence:
            pass
        awaited = self._rank + 1
        for other in self._others:
            if words[other + ASLEEP] == awaited:
                futex.wake(self._address + self._own * WORD_BYTES)
                break
        for other in self._others:
            if words[other] < count:
                self._wait(words, other, count, call)
            if words[other + call_at] != call:
                self._refuse(call, self._members[other // STRIDE], words[other + call_at])
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
        """Say goodbye, and wake those that wait for this member. Safe to call twice."""
        self.broken = self.broken or "this communicator is closed"
        words, self._words = self._words, _NO_WORDS
        if len(words):
            words[self._own + GOODBYE] = self._num_complete + 1
            futex.wake(self._address + self._own * WORD_BYTES)
        self._processes.close()

    @property
    def _me(self) -> Member:
        return self._members[self._rank]

    def _wait(self, words: SharedWords, other: int, count: int, call: int) -> None:
        """Until the other's counter, at this word, has reached ``count``."""
        for _ in range(_SPINS):
            if words[other] >= count:
                return
        begin = time.monotonic()
        while time.monotonic() - begin < _OFFER_S:
            os.sched_yield()
            if words[other] >= count:
                return
        words[self._own + ASLEEP] = other // STRIDE + 1
        while (seen := words[other]) < count:
            futex.sleep(self._address + other * WORD_BYTES, seen, _SLEEP_S)
            if words[other] < count:
                self._check(words, count, call, time.monotonic() - begin)
        words[self._own + ASLEEP] = 0

    def _check(self, words: SharedWords, count: int, call: int, waited_s: float) -> None:
        """Raise if a member that has not arrived never will, the time is up, or this side was closed meanwhile."""
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
        """Which of the awaited members, by their words, will never come, and why; None if all of them may yet."""
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
        """Who is behind a member's goodbye, the one that it gave up waiting for or itself; and what happened."""
        member, blamed = self._members[line // STRIDE], words[line + BLAMED] - 1
        if blamed < 0:
            return member, "it left the group"
        if blamed == self._rank:
            return member, "it left the group, since it had waited for this process in vain"
        return self._members[blamed], f"{member} waited for it in vain, and left the group"

    def _blame(self, words: SharedWords, member: Member) -> None:
        """Let the others know who is behind it that this member will leave."""
        words[self._own + BLAMED] = 1 + list(self._members).index(member)

    def _refuse(self, call: int, member: Member, other_call: int) -> None:
        """Two members came for different calls: what they would exchange means nothing."""
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
