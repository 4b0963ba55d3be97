"""Counts of experience over processes that die: rows sent = learned from + dropped + in flight + lost with dead ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WorkerSampleCounts = Mapping[str, Any]
"""What a collector or a learner counts: see ``state_dict`` of their programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """Rows of experience (environments' rollouts) since the session began."""

    sent: int
    taken: int
    """Learned from, as far as was reported."""
    dropped: int
    """Released unused, since they were too old."""
    in_flight: int
    """Sent, and not released by a learner."""
    lost: int
    """Released by learners that died before they reported what became of them."""

    @property
    def missing(self) -> int:
        """0 where the counts add up."""
        return self.sent - self.taken - self.dropped - self.in_flight - self.lost

    def __str__(self) -> str:
        return (
            f"{self.sent:,} rollout rows sent = {self.taken:,} learned from + {self.dropped:,} dropped + "
            f"{self.in_flight:,} in flight + {self.lost:,} lost with learners"
        )


class SampleAccounting:
    """Keeps what the dead had counted. Processes are known by their origin: a number drawn by each collector's dispenser."""

    def __init__(self) -> None:
        self._taken = self._dropped = self._lost = 0
        """Of learners that are gone, as reported."""
        self._released_to_lost: Counter[int] = Counter()
        """By origin: rows that learners which are gone had released."""

    def record_lost_learners(
        self, collectors: Sequence[WorkerSampleCounts], last: Sequence[WorkerSampleCounts]
    ) -> None:
        """All learners are gone.

        Args:
            collectors: books of those that live, made after that
            last: what the learners reported last
        """
        self._taken += sum(counts["taken"] for counts in last)
        self._dropped += sum(counts["dropped"] for counts in last)
        for origin, (came, _) in _received(last).items():
            self._released_to_lost[origin] += (
                came  # of collectors that are gone: what had come is not sent again
            )
        for counts in collectors:
            self._released_to_lost[counts["origin"]] = counts["sent"] - counts["unreleased"]
        self._lost = sum(self._released_to_lost.values()) - self._taken - self._dropped

    def sample_counts(
        self, collectors: Sequence[WorkerSampleCounts], learners: Sequence[WorkerSampleCounts]
    ) -> SampleCounts:
        """Of books that were made while nobody worked."""
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
    """Over learners, by origin: rows that came, and those of them that were released."""
    came: Counter[int] = Counter()
    released: Counter[int] = Counter()
    for counts in learners:
        for origin, (rows, done) in counts["received"].items():
            came[origin] += rows
            released[origin] += done
    return {origin: (came[origin], released[origin]) for origin in came}
