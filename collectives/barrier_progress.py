"""Who has come to an operation of all, in memory where all members see it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # plans do not need torch
    from torch import Tensor


class BarrierProgress:
    """How many operations of all each member has come to. Who has come to more than this one waits for it.

    What is read costs a few loads, here and in compiled programs; after the communicator is closed it stays as it was.

    Attributes:
        counts: by rank, (world_size,) int64 at any stride, which others change
        rank: this member's
    """

    def __init__(self, counts: Tensor, rank: int) -> None:
        self.counts, self.rank = counts, rank
        self._words = counts.numpy()
        self._others = [other for other in range(len(counts)) if other != rank]

    def waiting_ranks(self) -> tuple[int, ...]:
        """Ranks that have come to an operation which this member has not begun: their cores are idle until then."""
        words = self._words
        own = words[self.rank]
        return tuple(other for other in self._others if words[other] > own)

    def address(self, rank: int) -> int:
        """Of a member's count."""
        return self.counts.data_ptr() + rank * self.counts.stride(0) * self.counts.element_size()
