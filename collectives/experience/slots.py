"""Slots of a producer ring: free list, slot headers, and the tensors that view each slot."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from collectives.experience import file_layout
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.messages import MessageLayout, MessageLayouts
from collectives.experience.reserved_slot import EncodedBatch


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
        """Write the header of a filled slot; the ticket last, because it publishes the rest."""
        words, header = self._words, self._headers[slot]
        words[header + file_layout.SLOT_SEQUENCE] = sequence
        words[header + file_layout.SLOT_VERSION] = version
        words[header + file_layout.SLOT_ROWS] = rows
        words[header + file_layout.SLOT_TIME_NS] = time.time_ns()
        words[header + file_layout.SLOT_TICKET] = ticket

    def set_state(self, slot: int, state: int) -> None:
        """Write the state that ``inspection`` reads."""
        self._words[self._headers[slot] + file_layout.SLOT_STATE] = state

    def set_free(self, slots: Iterable[int]) -> None:
        """Put slots back on the free list."""
        for slot in slots:
            self.set_state(slot, file_layout.STATE_FREE)
            self.free.append(slot)

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
