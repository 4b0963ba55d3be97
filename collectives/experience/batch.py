"""A batch in its producer's memory, and the consumer's link to that memory."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import weakref
from collections import deque
from contextlib import suppress
from typing import Self

import pyarrow as pa
from torch import Tensor

from collectives import futex
from collectives.experience import file_layout
from collectives.experience.errors import ChannelClosedError, ChannelError, LeaseExpiredError, SchemaError
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.messages import MessageLayout, MessageLayouts
from collectives.experience.schema import ExperienceSchema
from collectives.experience.spsc_queue import untaken_entries
from collectives.process_watcher import has_ended
from collectives.shared_words import SharedWords

_logger = logging.getLogger(__name__)


def _references_to_a_local() -> int:
    local = memoryview(b"")
    return sys.getrefcount(local)


_OWN_REFERENCES = _references_to_a_local()
"""Reference count of a batch's memory once no tensor is left: one local name, and the argument of ``getrefcount``."""


class ProducerLink:
    """One producer ring, seen from a consumer: the consumer's side of its ``SpscQueue``."""

    def __init__(
        self, layouts: MessageLayouts, ring_file: SharedFile, consumer_file: SharedFile, leaked: list[int]
    ) -> None:
        """Find the consumer's queue in a producer ring.

        ``leaked`` gets the sequence number of each batch that is released too early, or never.

        Raises:
            ChannelError: the ring has detached this consumer.
            SchemaError: the producer sends another schema.
        """
        self.channel, self.layouts, self.file = layouts.schema.name, layouts, ring_file
        self.words = words = ring_file.words
        self.pid, self.is_lost = words[file_layout.PID], False
        self._has_lease = bool(words[file_layout.HAS_LEASE])
        self._abandoned: deque[int] = deque()
        """Inherited slots that were not taken."""
        self._inherited: set[int] = set()
        """All inherited slots: a dead producer fills none again."""
        self.producer, self.origin = words[file_layout.PRODUCER], words[file_layout.ORIGIN]
        self.shape = RingLayout.of(words)
        self._refuse_other(layouts.schema)
        self.consumer = self._own_queue(consumer_file)
        self._queue_word = begin = self.shape.queue_word(self.consumer)
        # Of each take and release: computed once.
        self._released, self._voided, self._claims = (
            begin + at for at in (self.shape.released_at, self.shape.voided_at, self.shape.claims_at)
        )
        self._entries, self._places = begin + file_layout.QUEUE_AT, self.shape.places
        self._releases = itertools.count(1)  # next() is atomic: any thread may release
        self._leaked, self._owner = leaked, os.getpid()
        words[self._queue_word + file_layout.ATTACH_ACK] = 1

    @property
    def has_more(self) -> bool:
        """Whether it has batches that were not taken: posted, or inherited."""
        words, queue_word = self.words, self._queue_word
        return (
            bool(self._abandoned)
            or words[queue_word + file_layout.TAIL] != words[queue_word + file_layout.HEAD]
        )

    @property
    def is_closed(self) -> bool:
        """Whether the producer has closed its ring. Its queue may still have slots."""
        return bool(self.words[file_layout.CLOSED])

    def next_batch(self) -> Batch | None:
        """Take the oldest batch from the queue, then those that were inherited; None if there is none."""
        words, queue_word = self.words, self._queue_word
        head = words[queue_word + file_layout.HEAD]
        while words[queue_word + file_layout.TAIL] != head:
            # The tail was loaded first: it publishes the entry, and the slot's header and body with it.
            slot, ticket = file_layout.slot_and_ticket(words[self._entries + head % self._places])
            head += 1
            is_revoked = words[self._claims + slot]
            if is_revoked:
                words[self._voided + slot] = ticket
            words[queue_word + file_layout.HEAD] = head
            if not is_revoked:
                return Batch(self, slot, ticket, self._has_lease)
        return self.inherited_batch(self._abandoned.popleft()) if self._abandoned else None

    def inherited_batch(self, slot: int) -> Batch:
        """A batch that a killed producer left: none revokes it."""
        return Batch(self, slot, self.words[self.shape.slot_word(slot) + file_layout.SLOT_TICKET], False)

    def inherit(self) -> bool:
        """After the producer was killed: take what it left, unless another consumer does.

        Returns:
            whether every committed batch is released, by any consumer: nothing is left to inherit.
        """
        left = unreleased_batches(self.words, self.shape)
        if left and self.file.try_lock():
            # Those that this consumer took and still holds are unreleased, too: take each once.
            new = [slot for slot in self.abandoned() if slot not in self._inherited]
            self._inherited.update(new)
            self._abandoned.extend(new)
        return not left

    def abandoned(self) -> list[int]:
        """Slots that a killed producer committed, and that no live consumer has."""
        return abandoned_slots(self.channel, self.words, self.shape, self.consumer)

    def release(self, slot: int, ticket: int, has_lease: bool) -> bool:
        """Give a slot back, and wake the producer if it waits for one. False if it was revoked before. Thread-safe."""
        if os.getpid() != self._owner:
            return True  # a forked child's copy: the batch is its parent's
        words = self.words
        is_ours = not has_lease or futex.claim(self.file.word_address(self._claims + slot))
        # The ticket releases this very batch; then a change of the futex word, by a value no other consumer stores.
        words[(self._released if is_ours else self._voided) + slot] = ticket
        words[file_layout.FREED] = self.consumer << 24 | next(self._releases) & 0xFFFFFF
        futex.wake(self.file.word_address(file_layout.FREED))
        return is_ours

    def report_leak(self, sequence: int, how: str) -> None:
        """Log that a slot stays withheld until its tensors are gone."""
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
        schema.refuse_other(file_layout.read_schema(message), whose)
        if self.shape.slot_stride != file_layout.slot_stride(
            self.layouts.for_rows(self.words[file_layout.ROWS]).size
        ):
            raise SchemaError(
                schema.name, f"{whose} has another batch layout: use one pyarrow version on both sides"
            )

    def _own_queue(self, consumer_file: SharedFile) -> int:
        own = file_layout.word_of(consumer_file.endpoint)
        for consumer in range(file_layout.MAX_CONSUMERS):
            if self.words[self.shape.queue_word(consumer) + file_layout.QUEUE_OWNER] == own:
                return consumer
        raise ChannelError(
            self.channel, f"producer {self.producer} of process {self.pid} has detached this consumer"
        )


class Batch:
    """Rows of one producer, in its memory, until released. Read-only: after a crash another consumer may read them.

    Releasing tells the producer that the rows are consumed. Tensors that outlive the release withhold the slot, and
    are reported.
    """

    __slots__ = (
        "__weakref__",
        "_base",
        "_has_lease",
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

    def __init__(self, link: ProducerLink, slot: int, ticket: int, has_lease: bool) -> None:
        header, words = link.shape.slot_word(slot), link.words
        self._link, self._slot, self._ticket, self._has_lease = link, slot, ticket, has_lease
        self.producer, self.origin = link.producer, link.origin
        self.sequence, self.version = (
            words[header + file_layout.SLOT_SEQUENCE],
            words[header + file_layout.SLOT_VERSION],
        )
        self.num_rows, self.committed_ns = (
            words[header + file_layout.SLOT_ROWS],
            words[header + file_layout.SLOT_TIME_NS],
        )
        self._layout: MessageLayout = link.layouts.for_rows(self.num_rows)
        begin = header * file_layout.WORD + file_layout.SLOT_HEADER_BYTES + self._layout.lead
        # A memoryview of this batch alone: its reference count counts every tensor, slice and Arrow view of the batch.
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
        """Slots of the producer ring that this batch is from."""
        return self._link.shape.slots

    def record_batch(self) -> pa.RecordBatch:
        """The batch as Arrow record batch, in place."""
        return self._link.layouts.read(self._memory())

    def release(self) -> None:
        """Tell the producer that these rows are consumed. Safe to call twice; thread-safe.

        Raises:
            LeaseExpiredError: this batch was held longer than its lease, and another consumer got it. What was read or
                copied from it is void: the producer may have overwritten it.
        """
        if self._base is None:
            return
        base, self._base, self._tensors = self._base, None, {}
        if sys.getrefcount(base) <= _OWN_REFERENCES:
            if not self._link.release(self._slot, self._ticket, self._has_lease):
                raise LeaseExpiredError(
                    self._link.channel,
                    f"batch {self.sequence} of producer {self.producer} was held longer than its lease and went to another "
                    "consumer: discard what was read from it, or give the ring a longer lease_s",
                )
            return
        self._link.report_leak(self.sequence, "was released while tensors of it are in use")
        self._release_with(base)

    def _release_with(self, base: memoryview) -> None:
        """Release once nothing refers to the memory. Not at exit: the producer then posts the batch to another consumer."""
        weakref.finalize(base, self._link.release, self._slot, self._ticket, self._has_lease).atexit = False

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

    def __exit__(self, *error: object) -> None:
        self.release()


def unreleased_batches(words: SharedWords, shape: RingLayout) -> dict[int, int]:
    """Tickets of the committed batches of a ring that no consumer has released, oldest first; and their slots.

    Consumers read them from the ring's memory, which each of them maps from its connection on. A batch in the queue of a
    live consumer is that consumer's. The others are *abandoned*: one consumer, which holds the lock of the ring's file,
    takes them. The kernel releases the lock when that consumer ends; what it had not released is then abandoned again.
    """
    # A dead producer stores nothing more; consumers only store releases, so that the answer can only shrink.
    committed = words[file_layout.COMMITTED]
    queues = [shape.queue_word(number) + shape.released_at for number in range(file_layout.MAX_CONSUMERS)]
    found = {}
    for slot in range(shape.slots):
        header = shape.slot_word(slot)
        ticket = words[header + file_layout.SLOT_TICKET]
        is_free = words[header + file_layout.SLOT_STATE] == file_layout.STATE_FREE
        if (
            0 < ticket >> file_layout.GENERATION_BITS <= committed
            and not is_free
            and all(words[at + slot] != ticket for at in queues)
        ):
            found[ticket] = slot
    return dict(sorted(found.items()))


def abandoned_slots(channel: str, words: SharedWords, shape: RingLayout, own_queue: int) -> list[int]:
    """Slots of a dead producer's unreleased batches that are in the queue of no live consumer, oldest first.

    Batches in ``own_queue``, of the calling consumer, are not abandoned.
    """
    found = []
    for ticket, slot in unreleased_batches(words, shape).items():
        queue = words[shape.slot_word(slot) + file_layout.SLOT_STATE] - file_layout.STATE_POSTED
        entry = file_layout.entry_of(slot, ticket)
        begin = shape.queue_word(queue)
        if (
            queue < 0
            or words[begin + file_layout.QUEUE_AT + words[begin + file_layout.TAIL] % shape.places]
            == entry  # killed before the tail that publishes it
            or words[begin + shape.voided_at + slot] == ticket  # killed while it revoked the batch
            or (queue != own_queue and not _will_release(channel, words, shape, queue, entry))
        ):
            found.append(slot)
    return found


def _will_release(channel: str, words: SharedWords, shape: RingLayout, queue: int, entry: int) -> bool:
    """Whether the consumer of this queue has a posted batch, or can still take it."""
    endpoint = file_layout.endpoint_in(words[shape.queue_word(queue) + file_layout.QUEUE_OWNER])
    if has_ended(file_layout.pid_of(endpoint)):
        return False
    with suppress(ChannelError):  # it is closed: its file is gone
        consumer_file = SharedFile.open(channel, endpoint, file_layout.CONSUMER_MAGIC)
        if not consumer_file.words[file_layout.CONSUMER_CLOSED]:
            return True
    # A closed consumer takes nothing more. Loaded after ``CONSUMER_CLOSED``, so that its last take is seen.
    return entry not in untaken_entries(words, shape, queue)
