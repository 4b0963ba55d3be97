"""Outstanding Ray calls, one request per GMI, for sessions whose GMIs are free-running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray

from actors.protocols import IterationResult

if TYPE_CHECKING:  # as in session.py
    from actors.groups import GmiGroup

CALL_DURATION_S = 0.25
"""Target duration of a request. After each one a GMI is idle for some milliseconds, until the driver calls it again."""
_MAX_ITERATIONS = 64

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


class PendingCalls:
    """The requests of a group until they complete. A request is a chain of Ray calls, which an actor executes in order."""

    def __init__(self, group: GmiGroup) -> None:
        self._group = group
        self._by_last_ref: dict[Any, _PendingCall] = {}
        self._iteration_s: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def is_busy(self, index: int, kind: CallKind | None = None) -> bool:
        """Whether a GMI has an outstanding request (of this kind)."""
        return any(call.index == index and kind in (None, call.kind) for call in self._by_last_ref.values())

    def has_restarts(self) -> bool:
        """Whether a GMI is being restarted."""
        return any(call.kind == "restart" for call in self._by_last_ref.values())

    def add(self, index: int, refs: Sequence[Any], asked: str, kind: CallKind = "work") -> None:
        """Register a request: the refs of its calls to GMI ``index``, in order."""
        self._by_last_ref[refs[-1]] = _PendingCall(index, kind, tuple(refs), asked)

    def wait(self, timeout_s: float) -> list[CompletedCall]:
        """Wait for the first request to complete; returns all that have."""
        pending = list(self._by_last_ref)
        ready, rest = ray.wait(pending, timeout=timeout_s) if pending else ([], [])
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [self._completed(self._by_last_ref.pop(ref)) for ref in ready]

    def discard(self, index: int) -> None:
        """Drop the requests of a lost GMI."""
        self._by_last_ref = {ref: call for ref, call in self._by_last_ref.items() if call.index != index}
        self._idle_since.pop(index, None)

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
            self._idle_since.setdefault(index, time.monotonic())

    def idle_s(self) -> float:
        """Time for which every GMI has returned no results; 0 if one has returned some."""
        if len(self._idle_since) < len(self._group.handles):
            return 0.0
        return time.monotonic() - max(self._idle_since.values())

    def _completed(self, call: _PendingCall) -> CompletedCall:
        for ref in call.refs:
            ready, _ = ray.wait(
                [ref], timeout=0
            )  # calls run in order: before a failed call, all have completed
            failure = self._group.failure(call.index, ref, call.asked) if ready else None
            if failure is not None:
                return CompletedCall(call.index, call.kind, (), failure)
        return CompletedCall(call.index, call.kind, tuple(ray.get(list(call.refs))), None)
