"""A slot that its producer fills, and a committed batch as bytes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:  # which creates these
    from collectives.experience.producer_ring import ProducerRing

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """A committed batch as bytes, for routes without shared memory."""

    sequence: int
    version: int
    rows: int
    message: memoryview
    """Arrow IPC message, in the slot."""


class ReservedSlot:
    """A slot to be filled. Consumers see it after ``commit``; from then on the producer must not write to its tensors."""

    __slots__ = ("_is_open", "_ring", "num_rows", "slot", "tensors")

    def __init__(self, ring: ProducerRing, slot: int, num_rows: int, tensors: dict[str, Tensor]) -> None:
        self._ring, self.slot, self.num_rows, self.tensors = ring, slot, num_rows, tensors
        self._is_open = True

    def __getitem__(self, name: str) -> Tensor:
        """A field's rows, (num_rows, *shape), in the slot. They hold old values until they are overwritten."""
        return self.tensors[name]

    @property
    def is_open(self) -> bool:
        """Whether it is neither committed nor cancelled."""
        return self._is_open

    @property
    def message(self) -> memoryview:
        """All bytes of its Arrow message, to be overwritten by a message with the same number of rows."""
        return self._ring.message(self.slot, self.num_rows)

    def commit(self, version: int, to: int | None = None, sequence: int | None = None) -> int:
        """Post the batch to a consumer. Returns its sequence number, from 1.

        Args:
            version: of the policy
            to: the consumer's queue, whatever its credit; None: the consumer with the least backlog. Without one that has
                credit left, the batch waits in the ring until the next call of any method
            sequence: for batches that are forwarded from another ring: their number there

        Raises:
            ChannelError: it was committed or cancelled before.
            ChannelClosedError: the producer ring was closed meanwhile.
            ValueError: a version or number below 0.
        """
        posted = self._ring.commit(self, version, to, sequence)
        self._is_open = False
        return posted

    def cancel(self) -> None:
        """Free the slot without posting it. No effect after ``commit`` or ``cancel``."""
        if self._is_open:
            self._is_open = False
            self._ring.cancel(self)

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            _logger.warning(
                "channel %r: a reserved slot of producer %d was neither committed nor cancelled; it is free again",
                self._ring.schema.name,
                self._ring.producer,
            )
            self.cancel()
