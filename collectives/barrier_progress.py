"""Barrier progress: how many operations each member has begun, in shared memory. Shows which members are waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans need no torch
    from torch import Tensor


class BarrierProgress:
    """Operations begun by each member. A member that has begun more than this one is waiting for it.

    Reading costs a few loads, in Python and in C. After the communicator is closed the counts no longer change.

    Attributes:
        counts: operations begun, by rank: (world_size,) int64 at any stride; each member changes its own
        rank: of this member
    """

    def __init__(self, counts: Tensor, rank: int) -> None:
        self.counts, self.rank = counts, rank
        self._words = counts.numpy()
        self._others = [other for other in range(len(counts)) if other != rank]

    def waiting_ranks(self) -> tuple[int, ...]:
        """Ranks that are in an operation which this member has not begun: their cores are idle until it does."""
        words = self._words
        own = words[self.rank]
        return tuple(other for other in self._others if words[other] > own)

    def address(self, rank: int) -> int:
        """Address of a member's count."""
        return self.counts.data_ptr() + rank * self.counts.stride(0) * self.counts.element_size()
