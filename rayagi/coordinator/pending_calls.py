"""Outstanding Ray calls, one request per GMI, for sessions whose GMIs are free-running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray

from actors.errors import GmiLostError
from actors.ping import PING_INTERVAL_S
from actors.protocols import IterationResult
from collectives.limits import WaitedTime
from rayagi.coordinator.cluster import BUILD_TIMEOUT_S, ITERATION_TIMEOUT_S, START_TIMEOUT_S

if TYPE_CHECKING:  # as in session.py
    from actors.groups import GmiGroup

CALL_DURATION_S = 0.25
"""Target duration of a request. After each one a GMI is idle for some milliseconds, until the driver calls it again."""
_MAX_ITERATIONS = 64
_LONGEST_LOOK_S = 10.0
"""A driver that has not looked for longer was stopped, or did something else."""

CallKind = Literal["work", "restart"]


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """A request that has ended."""

    index: int
    kind: CallKind
    answers: tuple[Any, ...]
    """One result per Ray call; empty if one failed."""
    failure: Exception | None


@dataclass(frozen=True, slots=True)
class _PendingCall:
    index: int
    kind: CallKind
    refs: tuple[Any, ...]
    asked: str
    begun_s: float
    """As ``WaitedTime`` counts: without the time for which the driver was stopped."""
    limit_s: float


class PendingCalls:
    """The requests of a group until they complete. A request is a chain of Ray calls, which an actor executes in order.

    Args:
        group: the GMIs
        silence_s: a GMI that takes so much longer than usual is lost, since a stopped or stuck process never answers
    """

    def __init__(self, group: GmiGroup, silence_s: float) -> None:
        self._group, self._silence_s = group, silence_s
        self._waited = WaitedTime(_LONGEST_LOOK_S)
        self._by_last_ref: dict[Any, _PendingCall] = {}
        self._iteration_s: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def is_busy(self, index: int, kind: CallKind | None = None) -> bool:
        """Whether a GMI has an outstanding request (of this kind)."""
        return any(call.index == index and kind in (None, call.kind) for call in self._by_last_ref.values())

    def add(
        self, index: int, refs: Sequence[Any], asked: str, kind: CallKind = "work", num_iterations: int = 1
    ) -> None:
        """Register a request: the refs of its calls to GMI ``index``, in order."""
        begun_s, limit_s = self._waited.look(), self._limit_s(index, kind, num_iterations)
        self._by_last_ref[refs[-1]] = _PendingCall(index, kind, tuple(refs), asked, begun_s, limit_s)

    def _limit_s(self, index: int, kind: CallKind, num_iterations: int) -> float:
        if kind == "restart":
            return START_TIMEOUT_S + BUILD_TIMEOUT_S
        # Imported here: it needs torch, which the session imports in the background while Ray starts.
        from rayagi.algorithms.dataflow import POLL_TIMEOUT_S

        own_s = self._iteration_s.get(index)
        if own_s is None:  # the first iteration of a process may compile
            return ITERATION_TIMEOUT_S
        return self._silence_s + num_iterations * max(own_s, POLL_TIMEOUT_S)

    def wait(self, timeout_s: float) -> list[CompletedCall]:
        """Wait for the first request to complete; returns all that have, and those beyond their limit, as lost."""
        pending = list(self._by_last_ref)
        ready, rest = ray.wait(pending, timeout=timeout_s) if pending else ([], [])
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        completed = [self._completed(self._by_last_ref.pop(ref)) for ref in ready]
        now_s = self._waited.look()
        late = [ref for ref, call in self._by_last_ref.items() if now_s > call.begun_s + call.limit_s]
        completed += [self._silent(self._by_last_ref.pop(ref)) for ref in late]
        return completed + self._stopped()

    def discard(self, index: int) -> None:
        """Drop the requests of a lost GMI."""
        self._by_last_ref = {ref: call for ref, call in self._by_last_ref.items() if call.index != index}
        self._idle_since.pop(index, None)
        self._iteration_s.pop(index, None)

    def iterations_per_call(self, index: int) -> int:
        """Iterations per request, so that one takes about ``CALL_DURATION_S``."""
        own_s = self._iteration_s.get(index)
        return 1 if not own_s else max(1, min(_MAX_ITERATIONS, int(CALL_DURATION_S / own_s)))

    def record_results(self, index: int, results: Sequence[IterationResult]) -> None:
        """Record a GMI's iteration time, or the time since which it has returned no results."""
        if results:
            self._idle_since.pop(index, None)
            self._iteration_s[index] = sum(one.metrics["iteration_s"] for one in results) / len(results)
        else:
            self._idle_since.setdefault(index, self._waited.look())

    def idle_s(self) -> float:
        """Time for which every GMI has returned no results; 0 if one has returned some."""
        if len(self._idle_since) < len(self._group.handles):
            return 0.0
        return self._waited.look() - max(self._idle_since.values())

    def _stopped(self) -> list[CompletedCall]:
        """Requests to GMIs whose process answers no pings; those of the last seconds say nothing yet."""
        asked_before_s = self._waited.look() - PING_INTERVAL_S
        old = {call.index: ref for ref, call in self._by_last_ref.items() if call.begun_s < asked_before_s}
        calls = [self._by_last_ref.pop(old[index]) for index in self._group.pings.silent(old)]
        return [
            CompletedCall(call.index, call.kind, (), self._group.silence(call.index, call.asked))
            for call in calls
        ]

    def _silent(self, call: _PendingCall) -> CompletedCall:
        known = f"it did not answer within {call.limit_s:.0f} s"
        if position := self._group.pings.code_position(call.index):
            known += f"; its program was at {position}"
        failure = GmiLostError(call.index, str(self._group.identities[call.index]), call.asked, known)
        return CompletedCall(call.index, call.kind, (), failure)

    def _completed(self, call: _PendingCall) -> CompletedCall:
        for ref in call.refs:
            # Calls run in order: before a failed call, all have completed.
            ready, _ = ray.wait([ref], timeout=0)
            failure = self._group.failure(call.index, ref, call.asked) if ready else None
            if failure is not None:
                return CompletedCall(call.index, call.kind, (), failure)
        return CompletedCall(call.index, call.kind, tuple(ray.get(list(call.refs))), None)
