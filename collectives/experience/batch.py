"""What a consumer takes: a batch in its producer's memory, and the consumer's side of that memory."""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from types import TracebackType
from typing import Self

import pyarrow as pa
from torch import Tensor

from collectives import futex
from collectives.experience import memory as at
from collectives.experience.errors import ChannelClosedError, ChannelError, SchemaError
from collectives.experience.memory import OutboxShape, SharedFile
from collectives.experience.messages import Layouts, MessageLayout
from collectives.experience.schema import ExperienceSchema

_logger = logging.getLogger(__name__)


def _references_to_a_local() -> int:
    local = memoryview(b"")
    return sys.getrefcount(local)


_OWN_REFERENCES = _references_to_a_local()
"""To a batch's memory where no tensor is left: what one local name and the question itself count for, in this Python."""


class Link:
    """A consumer's side of one outbox."""

    def __init__(self, layouts: Layouts, endpoint: str, inbox: SharedFile, leaked: list[int]) -> None:
        """Map the outbox and find the consumer's line in it.

        Args:
            layouts: of what the consumer expects
            endpoint: of the outbox
            inbox: the consumer's
            leaked: gets the sequence number of each batch that is released too early, or never

        Raises:
            ChannelError: it is not there any more, or has let this consumer go.
            SchemaError: it sends something else.
        """
        self.channel, self.layouts, self.pid = layouts.schema.name, layouts, at.pid_of(endpoint)
        self.file = SharedFile.open(self.channel, endpoint, at.OUTBOX_MAGIC)
        self.words = words = self.file.words
        self.producer, self.origin = words[at.PRODUCER], words[at.ORIGIN]
        self.shape = OutboxShape(
            slots=words[at.SLOTS], slot_stride=words[at.STRIDE], schema_bytes=words[at.SCHEMA_BYTES]
        )
        self._refuse_other(layouts.schema)
        self.consumer = self._own_line(inbox)
        self._line = self.shape.line(self.consumer)
        self._releases = itertools.count(1)  # next() is one step, whichever threads release
        self._leaked = leaked
        words[self._line + at.FOUND] = 1

    @property
    def has_more(self) -> bool:
        """Whether something was posted that was not taken."""
        return self.words[self._line + at.TAIL] != self.words[self._line + at.HEAD]

    @property
    def is_over(self) -> bool:
        """Whether the producer has said goodbye. What it had posted may still be there."""
        return bool(self.words[at.CLOSED])

    def next_slot(self) -> int | None:
        """The oldest slot that was posted and not taken."""
        words, line = self.words, self._line
        head = words[line + at.HEAD]
        if words[line + at.TAIL] == head:
            return None
        slot = words[line + at.QUEUE_AT + head % self.shape.slots]
        words[line + at.HEAD] = head + 1
        return slot

    def release(self, slot: int, ticket: int) -> None:
        """Give a slot back, and wake the producer if it waits for one. By any thread."""
        words = self.words
        words[self._line + self.shape.released_at + slot] = ticket
        words[at.FREED] = self.consumer << 24 | next(self._releases) & 0xFFFFFF
        futex.wake(self.file.word_address(at.FREED))

    def report_leak(self, sequence: int, how: str) -> None:
        """Say that a slot cannot be used before its tensors are gone."""
        self._leaked.append(sequence)
        _logger.warning(
            "channel %r: batch %d of producer %d %s; its slot is withheld until its tensors are gone",
            self.channel,
            sequence,
            self.producer,
            how,
        )

    def _refuse_other(self, schema: ExperienceSchema) -> None:
        whose = f"producer {self.producer} of process {self.pid}"
        message = self.file.bytes[self.shape.schema_at : self.shape.schema_at + self.shape.schema_bytes]
        schema.refuse_other(at.read_schema(message), whose)
        if self.shape.slot_stride != at.slot_stride(self.layouts.of(self.words[at.ROWS]).size):
            raise SchemaError(
                schema.name, f"{whose} lays batches out in another way: use one pyarrow on both sides"
            )

    def _own_line(self, inbox: SharedFile) -> int:
        own = at.word_of(inbox.endpoint)
        for consumer in range(at.MAX_CONSUMERS):
            if self.words[self.shape.line(consumer) + at.CONSUMER_INBOX] == own:
                return consumer
        raise ChannelError(
            self.channel, f"producer {self.producer} of process {self.pid} has let this inbox go"
        )


class Batch:
    """Rows of one producer, in its memory, until released. Not to be written to: another consumer may have to read them.

    Releasing tells the producer that they are consumed. Tensors that outlive it keep the slot, and are reported.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_layout",
        "_link",
        "_slot",
        "_tensors",
        "_ticket",
        "committed_ns",
        "num_rows",
        "origin",
        "producer",
        "sequence",
        "version",
    )

    def __init__(self, link: Link, slot: int) -> None:
        header, words = link.shape.slot_word(slot), link.words
        self._link, self._slot, self._ticket = link, slot, words[header + at.SLOT_TICKET]
        self.producer, self.origin = link.producer, link.origin
        self.sequence, self.version = words[header + at.SLOT_SEQUENCE], words[header + at.SLOT_VERSION]
        self.num_rows, self.committed_ns = words[header + at.SLOT_ROWS], words[header + at.SLOT_TIME_NS]
        self._layout: MessageLayout = link.layouts.of(self.num_rows)
        begin = header * at.WORD + at.SLOT_HEADER_BYTES + self._layout.lead
        # Of this batch alone: whatever refers to the batch's memory refers to this object.
        self._base: memoryview | None = link.file.bytes[begin : begin + self._layout.size]
        self._tensors: dict[str, Tensor] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every field, (num_rows, *shape), in place."""
        if not self._tensors:
            self._tensors = self._layout.tensors(self._memory(), 0)
        return self._tensors

    def __getitem__(self, name: str) -> Tensor:
        """A field's rows, (num_rows, *shape), in place."""
        return self.tensors[name]

    @property
    def slots(self) -> int:
        """That its producer has for batches of this channel, this one's among them."""
        return self._link.shape.slots

    def record_batch(self) -> pa.RecordBatch:
        """The same bytes as Arrow has them."""
        return self._link.layouts.read(self._memory())

    def release(self) -> None:
        """Tell the producer that these rows are consumed. Safe to call twice; by any thread."""
        if self._base is None:
            return
        base, self._base, self._tensors = self._base, None, {}
        if sys.getrefcount(base) <= _OWN_REFERENCES:
            self._link.release(self._slot, self._ticket)
            return
        self._link.report_leak(self.sequence, "was released while tensors of it are in use")
        self._release_with(base)

    def _release_with(self, base: memoryview) -> None:
        """As soon as nothing refers to the memory; not at exit: then the process ends, and another consumer gets it."""
        weakref.finalize(base, self._link.release, self._slot, self._ticket).atexit = False

    def _memory(self) -> memoryview:
        if self._base is None:
            raise ChannelClosedError(
                self._link.channel, f"batch {self.sequence} was released: take its fields before"
            )
        return self._base

    def __del__(self) -> None:
        base = getattr(self, "_base", None)
        if base is not None and not sys.is_finalizing():
            self._link.report_leak(self.sequence, "was never released")
            self._base, self._tensors = None, {}
            self._release_with(base)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
