"""Requests under way, one per GMI: for sessions whose GMIs work at their own pace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import ray

from actors.protocols import IterationResult

if TYPE_CHECKING:  # as in session.py
    from actors.groups import GmiGroup

REQUEST_S = 0.25
"""About how long a request is to take: a GMI is idle from its end until the driver has asked again, some milliseconds."""
_MOST_ITERATIONS = 64

Kind = Literal["work", "restart"]


@dataclass(frozen=True, slots=True)
class Landed:
    """A request that ended."""

    index: int
    kind: Kind
    answers: tuple[Any, ...]
    """One per call; empty where one failed."""
    failure: Exception | None


@dataclass(frozen=True, slots=True)
class _Flight:
    index: int
    kind: Kind
    refs: tuple[Any, ...]
    asked: str


class Flights:
    """What was asked of whom, until it lands. A request is a chain of calls, which an actor answers in order."""

    def __init__(self, group: GmiGroup) -> None:
        self._group = group
        self._by_last: dict[Any, _Flight] = {}
        self._iteration_s: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def is_busy(self, index: int, kind: Kind | None = None) -> bool:
        """Whether something asked of a GMI, of this kind, has not landed."""
        return any(flight.index == index and kind in (None, flight.kind) for flight in self._by_last.values())

    def restarts(self) -> bool:
        """Whether a GMI is being started anew."""
        return any(flight.kind == "restart" for flight in self._by_last.values())

    def send(self, index: int, refs: Sequence[Any], asked: str, kind: Kind = "work") -> None:
        """Note the calls that were made of a GMI, in order."""
        self._by_last[refs[-1]] = _Flight(index, kind, tuple(refs), asked)

    def land(self, timeout_s: float) -> list[Landed]:
        """Requests that have ended; waits for the first of them."""
        flying = list(self._by_last)
        ready, rest = ray.wait(flying, timeout=timeout_s) if flying else ([], [])
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [self._landed(self._by_last.pop(ref)) for ref in ready]

    def forget(self, index: int) -> None:
        """What was asked of a GMI that is gone is not waited for."""
        self._by_last = {ref: flight for ref, flight in self._by_last.items() if flight.index != index}
        self._idle_since.pop(index, None)

    def size(self, index: int) -> int:
        """Iterations to ask of a GMI at a time."""
        own_s = self._iteration_s.get(index)
        return 1 if not own_s else max(1, min(_MOST_ITERATIONS, int(REQUEST_S / own_s)))

    def note(self, index: int, results: Sequence[IterationResult]) -> None:
        """Remember how long a GMI's iterations take, or since when it has come back with nothing."""
        if results:
            self._idle_since.pop(index, None)
            self._iteration_s[index] = sum(one.metrics["iteration_s"] for one in results) / len(results)
        else:
            self._idle_since.setdefault(index, time.monotonic())

    def idle_s(self) -> float:
        """For how long every GMI has come back with nothing; 0 while one has not."""
        if len(self._idle_since) < len(self._group.handles):
            return 0.0
        return time.monotonic() - max(self._idle_since.values())

    def _landed(self, flight: _Flight) -> Landed:
        for ref in flight.refs:
            ready, _ = ray.wait([ref], timeout=0)  # where a later call failed, an earlier one has answered
            failure = self._group.failure(flight.index, ref, flight.asked) if ready else None
            if failure is not None:
                return Landed(flight.index, flight.kind, (), failure)
        return Landed(flight.index, flight.kind, tuple(ray.get(list(flight.refs))), None)
