"""Sample accounting across lost processes: rows sent = learned from + dropped + in flight + lost with learners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WorkerSampleCounts = Mapping[str, Any]
"""Counters of a collector or a learner: see ``state_dict`` of their programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """Rows of experience (environments' rollouts) since the session began."""

    sent: int
    taken: int
    """Rows learned from, as far as reported."""
    dropped: int
    """Rows released unused, since they were too old."""
    in_flight: int
    """Rows sent and not yet released by a learner."""
    lost: int
    """Rows released by learners that were lost before they reported their use."""

    @property
    def missing(self) -> int:
        """Rows that are not accounted for: sent - taken - dropped - in_flight - lost; 0 if the counts are consistent."""
        return self.sent - self.taken - self.dropped - self.in_flight - self.lost


class SampleAccounting:
    """Keeps the counts of lost processes. Each collector process has an origin, a number that its dispenser draws."""

    def __init__(self) -> None:
        self._taken = self._dropped = self._lost = 0
        """Totals of lost learners, as last reported."""
        self._released_to_lost: Counter[int] = Counter()
        """Origin -> rows that lost learners have released."""

    def record_lost_learners(
        self, collectors: Sequence[WorkerSampleCounts], last: Sequence[WorkerSampleCounts]
    ) -> None:
        """Record that all learners were lost.

        Args:
            collectors: counts of the living collectors, taken after the loss
            last: last reported counts of the learners
        """
        self._taken += sum(counts["taken"] for counts in last)
        self._dropped += sum(counts["dropped"] for counts in last)
        for origin, (came, _) in _received(last).items():
            # For lost collectors: rows that had arrived are not sent again.
            self._released_to_lost[origin] += came
        # A living collector knows exactly what was released: sent - unreleased.
        for counts in collectors:
            self._released_to_lost[counts["origin"]] = counts["sent"] - counts["unreleased"]
        # lost = released by lost learners - what these reported as taken or dropped
        self._lost = sum(self._released_to_lost.values()) - self._taken - self._dropped

    def rows_from_lost(self, origin: int, learners: Sequence[WorkerSampleCounts]) -> int:
        """Rows that a lost collector had sent, as far as learners have reported, the lost learners included."""
        came, _ = _received(learners).get(origin, (0, 0))
        return came + self._released_to_lost[origin]

    def sample_counts(
        self, collectors: Sequence[WorkerSampleCounts], learners: Sequence[WorkerSampleCounts]
    ) -> SampleCounts:
        """Totals from counts that were taken while all GMIs were idle."""
        living = {counts["origin"] for counts in collectors}
        dead = {origin: rows for origin, rows in _received(learners).items() if origin not in living}
        released_to_lost = sum(
            rows for origin, rows in self._released_to_lost.items() if origin not in living
        )
        return SampleCounts(
            sent=sum(counts["sent"] for counts in collectors)
            + sum(came for came, _ in dead.values())
            + released_to_lost,
            taken=self._taken + sum(counts["taken"] for counts in learners),
            dropped=self._dropped + sum(counts["dropped"] for counts in learners),
            in_flight=sum(counts["unreleased"] for counts in collectors)
            + sum(came - released for came, released in dead.values()),
            lost=self._lost,
        )


def _received(learners: Sequence[WorkerSampleCounts]) -> dict[int, tuple[int, int]]:
    """Origin -> (received rows, released rows), summed over learners."""
    came: Counter[int] = Counter()
    released: Counter[int] = Counter()
    for counts in learners:
        for origin, (rows, done) in counts["received"].items():
            came[origin] += rows
            released[origin] += done
    return {origin: (came[origin], released[origin]) for origin in came}
