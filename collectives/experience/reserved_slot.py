"""A slot in its producer's hands: being filled, or committed and to be carried elsewhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # an outbox makes these
    from collectives.experience.producer_ring import ProducerRing

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A committed batch as bytes: what a way without shared memory carries."""

    sequence: int
    version: int
    rows: int
    message: memoryview
    """Arrow's, in the slot."""


class ReservedSlot:
    """A slot to be filled; nobody sees it before ``commit``. Its tensors are not the producer's any more after that."""

    __slots__ = ("_is_open", "_ring", "num_rows", "slot", "tensors")

    def __init__(self, ring: ProducerRing, slot: int, num_rows: int, tensors: dict[str, Tensor]) -> None:
        self._ring, self.slot, self.num_rows, self.tensors = ring, slot, num_rows, tensors
        self._is_open = True

    def __getitem__(self, name: str) -> Tensor:
        """A field's rows, (num_rows, *shape), in the slot: what was there before is still there."""
        return self.tensors[name]

    @property
    def is_open(self) -> bool:
        """Whether it is neither committed nor cancelled."""
        return self._is_open

    @property
    def message(self) -> memoryview:
        """All bytes of its Arrow message, to be filled with those of another of as many rows."""
        return self._ring.message(self.slot, self.num_rows)

    def commit(self, version: int, to: int | None = None, sequence: int | None = None) -> int:
        """Post it: to a consumer's line, or to the one with the least backlog. Returns its sequence number, from 1.

        A consumer that is named gets it beyond its credit, too. Without one that may have one more, the batch waits in the
        outbox for the next call of any method. Who passes on batches of another outbox gives the number that they had there.

        Raises:
            ChannelError: it was committed or cancelled before.
            ChannelClosedError: the outbox was closed meanwhile.
            ValueError: a version or number below 0.
        """
        posted = self._ring.commit(self, version, to, sequence)
        self._is_open = False
        return posted

    def cancel(self) -> None:
        """Give the slot back unseen. Nothing happens after ``commit``, or a second time."""
        if self._is_open:
            self._is_open = False
            self._ring.cancel(self)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            _logger.warning(
                "channel %r: a claim of producer %d was dropped, neither committed nor cancelled; its slot is free again",
                self._ring.schema.name,
                self._ring.producer,
            )
            self.cancel()
