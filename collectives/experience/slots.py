"""Slots of a producer ring: free list, slot headers, and the tensors that view each slot."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from collectives.experience import file_layout
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.messages import MessageLayout, MessageLayouts

if TYPE_CHECKING:
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


class Slots:
    """The slots of one producer ring. Between commit and reuse only the state in a slot's header changes."""

    def __init__(self, file: SharedFile, shape: RingLayout, layouts: MessageLayouts, rows: int) -> None:
        self.free = deque(range(shape.slots))
        self._bytes, self._words = file.bytes, file.words
        self._shape, self._layouts, self._rows = shape, layouts, rows
        self._headers = [shape.slot_word(slot) for slot in range(shape.slots)]
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._metadata_rows = [-1] * shape.slots

    def begin(self, rows: int) -> tuple[int, dict[str, Tensor]]:
        """Take a free slot for a batch of ``rows`` rows: its number, and each field as (rows, *shape)."""
        # Oldest free slot first, so that ``inspection`` can read the newest batches for as long as possible.
        slot = self.free.popleft()
        # 0 marks the content invalid before it changes: a reader that sees the old ticket twice has a whole copy.
        self._words[self._headers[slot] + file_layout.SLOT_TICKET] = 0
        self.set_state(slot, file_layout.STATE_RESERVED)
        return slot, self._views(slot, rows)

    def commit(self, slot: int, ticket: int, sequence: int, version: int, rows: int) -> None:
        """Write the header of a filled slot; the ticket last, because it publishes the rest to ``inspection``."""
        words, header = self._words, self._headers[slot]
        words[header + file_layout.SLOT_SEQUENCE] = sequence
        words[header + file_layout.SLOT_VERSION] = version
        words[header + file_layout.SLOT_ROWS] = rows
        words[header + file_layout.SLOT_TIME_NS] = time.time_ns()
        words[header + file_layout.SLOT_TICKET] = ticket

    def set_state(self, slot: int, state: int) -> None:
        """Write the state."""
        self._words[self._headers[slot] + file_layout.SLOT_STATE] = state

    def set_free(self, slots: Iterable[int]) -> None:
        """Put slots back on the free list."""
        for slot in slots:
            self.set_state(slot, file_layout.STATE_FREE)
            self.free.append(slot)

    def renew_ticket(self, slot: int) -> None:
        """Count a revocation of the batch in a slot."""
        self._words[self._headers[slot] + file_layout.SLOT_TICKET] += 1

    def ticket(self, slot: int) -> int:
        """Ticket of the batch in a slot."""
        return self._words[self._headers[slot] + file_layout.SLOT_TICKET]

    def sequence(self, slot: int) -> int:
        """Sequence number of the batch in a slot."""
        return self._words[self._headers[slot] + file_layout.SLOT_SEQUENCE]

    def encoded_batch(self, slot: int) -> EncodedBatch:
        """The batch in a slot, as bytes."""
        words, header = self._words, self._headers[slot]
        rows = words[header + file_layout.SLOT_ROWS]
        return EncodedBatch(
            self.sequence(slot), words[header + file_layout.SLOT_VERSION], rows, self.message(slot, rows)
        )

    def message(self, slot: int, rows: int) -> memoryview:
        """The bytes of the Arrow message in a slot."""
        layout = self._layouts.for_rows(rows)
        begin = self._message_at(slot, layout)
        return self._bytes[begin : begin + layout.size]

    def _views(self, slot: int, rows: int) -> dict[str, Tensor]:
        """Write the Arrow metadata for ``rows`` rows, and view the body as tensors. Views of full batches are cached."""
        layout = self._layouts.for_rows(rows)
        begin = self._message_at(slot, layout)
        if self._metadata_rows[slot] != rows:
            self._bytes[begin : begin + len(layout.metadata)] = layout.metadata
            self._metadata_rows[slot] = rows
        if rows != self._rows:
            return layout.tensors(self._bytes, begin)
        if slot not in self._tensors:
            self._tensors[slot] = layout.tensors(self._bytes, begin)
        return self._tensors[slot]

    def _message_at(self, slot: int, layout: MessageLayout) -> int:
        return self._headers[slot] * file_layout.WORD + file_layout.SLOT_HEADER_BYTES + layout.lead
