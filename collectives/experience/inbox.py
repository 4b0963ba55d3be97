"""A consumer's end of a channel: takes batches from every producer that knocked, as views of their memory."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from types import TracebackType
from typing import Self

import pyarrow as pa
from torch import Tensor

from collectives import futex
from collectives.experience import memory as at
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.memory import OutboxShape, SharedFile
from collectives.experience.messages import Layouts, MessageLayout
from collectives.experience.schema import ExperienceSchema
from collectives.processes import Processes

_logger = logging.getLogger(__name__)

_OFFER_S = 200e-6
"""How long the processor is offered to others before sleeping: the producer may have just begun to post."""
_SLEEP_S = 0.05
"""After which a consumer that waits looks whether its producers are alive."""
_OWN_REFERENCES = 2
"""To a batch's memory where no tensor is left: the batch's own, and the one that asks."""


class Batch:
    """Rows of one producer, in its memory, until released.

    Releasing tells the producer that they are consumed. Tensors that outlive it keep the slot, and are reported.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_layout",
        "_link",
        "_slot",
        "_tensors",
        "committed_ns",
        "num_rows",
        "origin",
        "producer",
        "sequence",
        "version",
    )

    def __init__(self, link: _Link, slot: int) -> None:
        header = link.slot_word(slot)
        words = link.words
        self.sequence, self.version = words[header + at.SLOT_SEQUENCE], words[header + at.SLOT_VERSION]
        self.num_rows, self.committed_ns = words[header + at.SLOT_ROWS], words[header + at.SLOT_TIME_NS]
        self.producer, self.origin = link.producer, link.words[at.ORIGIN]
        self._link, self._slot = link, slot
        self._layout: MessageLayout = link.layouts.of(self.num_rows)
        begin = header * at.WORD + at.SLOT_HEADER_BYTES
        # Of this batch alone: it lives as long as a tensor of this batch does.
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
        return self._link.layouts.read(self._memory(), 0, self.num_rows)

    def release(self) -> None:
        """Tell the producer that these rows are consumed. Safe to call twice."""
        if self._base is None:
            return
        base, self._base, self._tensors = self._base, None, {}
        if sys.getrefcount(base) <= _OWN_REFERENCES:
            self._link.release(self._slot, self.sequence)
            return
        self._link.report_leak(self, "was released while tensors of it are in use")
        self._release_with(base)

    def _release_with(self, base: memoryview) -> None:
        finalizer = weakref.finalize(base, self._link.release, self._slot, self.sequence)
        finalizer.atexit = False

    def _memory(self) -> memoryview:
        if self._base is None:
            raise ChannelClosedError(
                self._link.channel, f"batch {self.sequence} was released: take its fields before"
            )
        return self._base

    def __del__(self) -> None:
        base = getattr(self, "_base", None)
        if base is not None:
            self._link.report_leak(self, "was never released")
            self._base, self._tensors = None, {}
            self._release_with(base)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Link:
    """A consumer's side of one outbox."""

    def __init__(self, schema: ExperienceSchema, layouts: Layouts, endpoint: str, inbox: SharedFile) -> None:
        self.channel, self.endpoint = schema.name, endpoint
        self.pid = at.pid_of(endpoint)
        self.file = SharedFile.open(schema.name, endpoint, at.OUTBOX_MAGIC)
        self.words = words = self.file.words
        self.layouts = layouts
        self.producer = words[at.PRODUCER]
        self.shape = OutboxShape(
            slots=words[at.SLOTS], slot_stride=words[at.STRIDE], schema_bytes=words[at.SCHEMA_BYTES]
        )
        message = self.file.bytes[self.shape.schema_at : self.shape.schema_at + self.shape.schema_bytes]
        schema.refuse_other(at.read_schema(message), f"producer {self.producer} of process {self.pid}")
        self.line = self._own_line(inbox)
        self._releases = self.leaks = 0
        if self.line is not None:
            words[self.line + at.ATTACHED] = 1

    def _own_line(self, inbox: SharedFile) -> int | None:
        own = at.pid_and_file(inbox.endpoint)
        for consumer in range(at.MAX_CONSUMERS):
            line = self.shape.line(consumer)
            if self.words[line + at.CONSUMER_PID] << 32 | self.words[line + at.INBOX_FILE] == own:
                return line
        return None  # the producer has dropped it again: it will knock anew

    def next_slot(self) -> int | None:
        """The oldest slot that was posted and not taken."""
        if self.line is None:
            return None
        words, line = self.words, self.line
        head = words[line + at.HEAD]
        if words[line + at.TAIL] == head:
            return None
        slot = words[line + at.QUEUE_AT + head % self.shape.slots]
        words[line + at.HEAD] = head + 1
        return slot

    @property
    def is_over(self) -> bool:
        """Whether the producer has said goodbye. What it had posted may still be there."""
        return bool(self.words[at.CLOSED])

    def slot_word(self, slot: int) -> int:
        """Where a slot's header begins."""
        return (self.shape.slots_at + slot * self.shape.slot_stride) // at.WORD

    def release(self, slot: int, sequence: int) -> None:
        """Give a slot back, and wake the producer if it waits for one."""
        assert self.line is not None
        words = self.words
        words[self.line + self.shape.released_at + slot] = sequence
        self._releases += 1
        words[self.line + at.RELEASED_COUNT] = self._releases
        consumer = (self.line - at.CONSUMERS_AT) // self.shape.line_words
        words[at.FREED] = consumer << 24 | self._releases & 0xFFFFFF
        futex.wake(self.file.word_address(at.FREED))

    def report_leak(self, batch: Batch, how: str) -> None:
        """Say that a slot cannot be used before its tensors are gone."""
        self.leaks += 1
        _logger.warning(
            "channel %r: batch %d of producer %d %s; its slot is withheld until they are gone",
            self.channel,
            batch.sequence,
            batch.producer,
            how,
        )


class Inbox:
    """One consumer's end. Not for several threads at once; batches may be released by any.

    ::

        inbox = Inbox(schema)              # tell producers inbox.endpoint
        with inbox.take(timeout_s=10.0) as batch:
            learn(batch["obs"])
    """

    def __init__(self, schema: ExperienceSchema) -> None:
        """Open it.

        Raises:
            ChannelError: there is no memory for it.
        """
        self.schema = schema
        self._layouts = Layouts(schema)
        message = self._layouts.schema_message()
        begin = (at.KNOCKS_AT + at.MAX_PRODUCERS) * at.WORD
        self._file = SharedFile.create(schema.name, at.page_aligned(begin + len(message)))
        self._file.bytes[begin : begin + len(message)] = message
        words = self._file.words
        words[at.INBOX_PID], words[at.INBOX_SCHEMA_BYTES] = os.getpid(), len(message)
        words[at.MAGIC] = at.INBOX_MAGIC
        self._links: list[_Link] = []
        self._knocks = slice(at.KNOCKS_AT * at.WORD, (at.KNOCKS_AT + at.MAX_PRODUCERS) * at.WORD)
        self._answered = bytes(self._file.bytes[self._knocks])
        self._processes = Processes()
        self._next = 0
        self._closed = False
        self.lost: list[int] = []
        """Producers whose process ended without a goodbye, in the order in which that was noticed."""

    @property
    def endpoint(self) -> str:
        """What producers attach to."""
        return self._file.endpoint

    @property
    def producers(self) -> tuple[int, ...]:
        """Those that have knocked, are alive or have left something."""
        self._answer()
        return tuple(link.producer for link in self._links)

    @property
    def leaks(self) -> int:
        """Batches that were released too early, or never."""
        return sum(link.leaks for link in self._links)

    def take(self, timeout_s: float = 60.0) -> Batch | None:
        """The next batch, of the producers in turn; None once producers came and all have left and are drained.

        Raises:
            ChannelTimeoutError: nothing came within the time limit.
            SchemaError: a producer sends something else.
        """
        begin = time.monotonic()
        while True:
            if self._closed:
                raise ChannelClosedError(self.schema.name, "this inbox is closed")
            seen = self._file.words[at.BELL]
            self._answer()
            slot = self._look()
            if slot is not None:
                return slot
            if self._all_left():
                return None
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._who_is_silent(), waited_s)
            if waited_s < _OFFER_S:
                os.sched_yield()
                continue
            futex.sleep(self._file.word_address(at.BELL), seen, _SLEEP_S)
            self._bury()

    def close(self) -> None:
        """Take nothing any more; batches that are out stay valid. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._file.words[at.INBOX_CLOSED] = 1
            self._processes.close()
            self._file.close()

    def _look(self) -> Batch | None:
        for offset in range(len(self._links)):
            index = (self._next + offset) % len(self._links)
            slot = self._links[index].next_slot()
            if slot is not None:
                self._next = index + 1
                return Batch(self._links[index], slot)
        return None

    def _answer(self) -> None:
        """Connect to producers that have knocked since."""
        knocks = bytes(self._file.bytes[self._knocks])
        if knocks == self._answered:
            return
        came = memoryview(knocks).cast("Q")
        known = memoryview(self._answered).cast("Q")
        self._answered = knocks
        for producer in [place for place in range(at.MAX_PRODUCERS) if came[place] != known[place]]:
            endpoint = at.endpoint_in(came[producer])
            try:
                link = _Link(self.schema, self._layouts, endpoint, self._file)
            except SchemaError:
                raise
            except ChannelError:  # it knocked, and ended before anyone answered
                self._lose(producer, at.pid_of(endpoint))
            else:
                self._links.append(link)
                self._processes.watch(link.pid)

    def _all_left(self) -> bool:
        """Also lets go of producers that have said goodbye and have nothing left."""
        self._links = [link for link in self._links if not link.is_over or self._has_more(link)]
        return not self._links and any(self._answered)

    def _has_more(self, link: _Link) -> bool:
        return link.line is not None and link.words[link.line + at.TAIL] != link.words[link.line + at.HEAD]

    def _bury(self) -> None:
        """Let go of producers whose process has ended and that have left nothing more."""
        ended = self._processes.ended()
        for link in [link for link in self._links if link.pid in ended and not self._has_more(link)]:
            self._links.remove(link)
            if not link.is_over:
                self.lost.append(link.producer)
                _logger.warning(
                    "channel %r: producer %d was lost: its process %d has ended",
                    self.schema.name,
                    link.producer,
                    link.pid,
                )
            self._processes.forget(link.pid)

    def _lose(self, producer: int, pid: int) -> None:
        self.lost.append(producer)
        _logger.warning(
            "channel %r: producer %d was lost: its process %d has ended", self.schema.name, producer, pid
        )

    def _who_is_silent(self) -> str:
        names = ", ".join(f"producer {link.producer} (process {link.pid})" for link in self._links)
        return f"nothing came of {names}" if names else "no producer has come"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
