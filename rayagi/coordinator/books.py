"""Counts of experience over processes that die: rows sent = learned from + dropped + in flight + lost with dead ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Book = Mapping[str, Any]
"""What a collector or a learner counts: see ``state_dict`` of their programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
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


class Books:
    """Keeps what the dead had counted. Processes are known by their origin: a number drawn by each collector's dispenser."""

    def __init__(self) -> None:
        self._taken = self._dropped = self._lost = 0
        """Of learners that are gone, as reported."""
        self._settled: Counter[int] = Counter()
        """By origin: rows that learners which are gone had released."""

    def learners_lost(self, collectors: Sequence[Book], last: Sequence[Book]) -> None:
        """All learners are gone.

        Args:
            collectors: books of those that live, made after that
            last: what the learners reported last
        """
        self._taken += sum(book["taken"] for book in last)
        self._dropped += sum(book["dropped"] for book in last)
        for origin, (came, _) in _received(last).items():
            self._settled[origin] += came  # of collectors that are gone: what had come is not sent again
        for book in collectors:
            self._settled[book["origin"]] = book["sent"] - book["unreleased"]
        self._lost = sum(self._settled.values()) - self._taken - self._dropped

    def account(self, collectors: Sequence[Book], learners: Sequence[Book]) -> Account:
        """Of books that were made while nobody worked."""
        living = {book["origin"] for book in collectors}
        dead = {origin: rows for origin, rows in _received(learners).items() if origin not in living}
        settled_dead = sum(rows for origin, rows in self._settled.items() if origin not in living)
        return Account(
            sent=sum(book["sent"] for book in collectors)
            + sum(came for came, _ in dead.values())
            + settled_dead,
            taken=self._taken + sum(book["taken"] for book in learners),
            dropped=self._dropped + sum(book["dropped"] for book in learners),
            in_flight=sum(book["unreleased"] for book in collectors)
            + sum(came - released for came, released in dead.values()),
            lost=self._lost,
        )


def _received(learners: Sequence[Book]) -> dict[int, tuple[int, int]]:
    """Over learners, by origin: rows that came, and those of them that were released."""
    came: Counter[int] = Counter()
    released: Counter[int] = Counter()
    for book in learners:
        for origin, (rows, done) in book["received"].items():
            came[origin] += rows
            released[origin] += done
    return {origin: (came[origin], released[origin]) for origin in came}
