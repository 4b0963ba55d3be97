"""Producer ring of a channel: slots in shared memory that the producer fills in place and posts to consumers."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives import futex
from collectives.closing import ClosesOnExit
from collectives.errors import counted
from collectives.experience import file_layout
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.messages import MessageLayouts
from collectives.experience.schema import ExperienceSchema
from collectives.experience.slots import EncodedBatch, ReservedSlot, Slots
from collectives.experience.spsc_queue import SpscQueue, open_consumer_file
from collectives.limits import WaitedTime
from collectives.process_watcher import ProcessWatcher

_logger = logging.getLogger(__name__)

_SLEEP_S = 0.05
"""Longest sleep of a blocked producer before it checks whether its consumers are alive."""


LEASE_S = 30.0
"""Default of ``lease_s``: shorter than the time limits of blocked producers."""


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """An attached consumer, as known to the producer."""

    queue: int
    """Number of its queue in this ring: what ``commit(to=)`` takes."""
    pid: int
    backlog: int
    """Batches that were posted to it and not released."""
    found: bool
    """Whether it has mapped this ring. From then on it can read its batches even if this process ends."""


class ProducerRing(ClosesOnExit):
    """Slots of one producer. Not thread-safe.

    A slot is free, reserved (being filled), waiting (committed, in no queue) or posted to one consumer; then free again.
    ::

        ring = ProducerRing(schema, rows=64, slots=4, producer=0)
        ring.attach(consumer_endpoint)
        slot = ring.reserve(64, timeout_s=10.0)
        slot["obs"].copy_(obs)
        slot.commit(version=3)
    """

    _closed = True

    def __init__(
        self,
        schema: ExperienceSchema,
        *,
        rows: int,
        slots: int = 4,
        producer: int = 0,
        credit: int | None = None,
        origin: int = 0,
        routed: bool = False,
        lease_s: float = LEASE_S,
    ) -> None:
        """Allocate the shared memory.

        Args:
            schema: fields of the channel
            rows: of a batch, at most
            slots: batches in flight: being filled, waiting, posted, or being read
            producer: its number in the channel, from 0
            credit: unreleased batches that one consumer may have; None: all slots
            origin: distinguishes this producer from former ones of its number; the same in all its rings
            routed: the owner posts each batch itself (``waiting``, ``post``, ``drop``), not this ring; there is no lease
            lease_s: a consumer that holds a batch for longer, or takes none for longer, loses it to another one that
                is attached. No lease where the kernel lacks ``FUTEX_TRYLOCK_PI``

        Raises:
            ChannelError: there is not enough memory.
            ValueError: a number is out of range.
        """
        if (
            min(rows, slots, slots if credit is None else credit) < 1
            or slots > file_layout.MAX_SLOTS
            or not 0 <= producer < file_layout.MAX_PRODUCERS
        ):
            raise ValueError(
                f"rows={rows}, slots={slots}, credit={credit} must be at least 1, slots at most {file_layout.MAX_SLOTS}, "
                f"and producer={producer} from 0 to {file_layout.MAX_PRODUCERS - 1}"
            )
        self.schema, self.rows, self.slots, self.producer = schema, rows, slots, producer
        self._owner = os.getpid()
        self._credit, self._routed = min(credit or slots, slots), routed
        self._lease_s = lease_s if not routed and futex.can_claim() else None
        self._row_bytes = schema.row_bytes
        self._layouts = MessageLayouts(schema)
        message = self._layouts.schema_message()
        self._shape = shape = RingLayout(
            slots=slots,
            slot_stride=file_layout.slot_stride(self._layouts.for_rows(rows).size),
            schema_bytes=len(message),
        )
        self._file = SharedFile.create(schema.name, shape.size)
        self._words = words = self._file.words
        self._file.bytes[shape.schema_at : shape.schema_at + len(message)] = message
        for word, value in (
            (file_layout.PID, file_layout.pid_of(self._file.endpoint)),
            (file_layout.PRODUCER, producer),
            (file_layout.ORIGIN, origin),
            (file_layout.ROWS, rows),
            (file_layout.SLOTS, slots),
            (file_layout.STRIDE, shape.slot_stride),
            (file_layout.SCHEMA_BYTES, len(message)),
            (file_layout.HAS_LEASE, self._lease_s is not None),
            (file_layout.MAGIC, file_layout.RING_MAGIC),
        ):
            words[word] = value
        self._slots = Slots(self._file, shape, self._layouts, rows)
        self._waiting: list[int] = []
        """Committed slots that were posted to no consumer, in the order of their tickets."""
        self._queues: dict[int, SpscQueue] = {}
        self._processes = ProcessWatcher()
        self._sequence = 0
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Address of its file."""
        return self._file.endpoint

    def attach(self, consumer_address: str) -> int:
        """Connect to a consumer. Returns the number of its queue; the same one if it is attached already.

        Raises:
            ChannelError: the consumer no longer exists, has another producer of this number, or no queue is free.
            SchemaError: the consumer expects another schema.
        """
        self._check_open()
        self._update()
        for number in self._queues:
            if self.is_attached_to(number, consumer_address):
                return number
        consumer_file = open_consumer_file(self.schema, consumer_address, self.producer, self.endpoint)
        free = [number for number in range(file_layout.MAX_CONSUMERS) if number not in self._queues]
        if not free:
            raise ChannelError(
                self.schema.name, f"{file_layout.MAX_CONSUMERS} consumers are attached already"
            )
        queue = SpscQueue(self.schema.name, self._file, self._shape, free[0], consumer_file)
        try:
            queue.request_connection(self._file)
        except ChannelError:
            queue.detach()
            raise
        self._queues[free[0]] = queue
        self._processes.watch(queue.pid)
        self._update()
        return free[0]

    def consumers(self) -> tuple[ConsumerState, ...]:
        """Consumers that are attached and alive."""
        self._update()
        return tuple(
            ConsumerState(number, queue.pid, len(queue.posted), queue.is_attached)
            for number, queue in self._queues.items()
        )

    def reserve(self, rows: int | None = None, timeout_s: float = 60.0) -> ReservedSlot:
        """Wait for a free slot for a batch of ``rows`` rows (None: as many as it holds).

        Raises:
            SchemaError: a slot does not hold that many.
            ChannelTimeoutError: no consumer released one within the time limit.
        """
        count = self.rows if rows is None else rows
        if not 0 <= count <= self.rows:
            raise SchemaError(
                self.schema.name,
                f"a batch of {counted(count, 'row')}: this ring's slots hold {self.rows}; make it with rows={count}",
            )
        self._check_open()
        self._update()
        if not self._slots.free:
            self._wait_for_slot(timeout_s)
        slot, tensors = self._slots.begin(count)
        return ReservedSlot(self, slot, count, tensors)

    def put(
        self, rows: Mapping[str, Tensor], version: int, timeout_s: float = 60.0, to: int | None = None
    ) -> int:
        """Reserve a slot, copy the rows, commit. Returns the sequence number.

        Raises:
            SchemaError: other fields, types or shapes than the channel's.
            ChannelTimeoutError: no consumer released a slot within the time limit.
        """
        reservation = self.reserve(self.schema.refuse_tensors(rows), timeout_s)
        try:
            with torch.no_grad():  # the slot's tensors outlive any graph
                for name, tensor in rows.items():
                    reservation.tensors[name].copy_(tensor)
            return reservation.commit(version, to)
        finally:
            reservation.cancel()

    def commit(self, reservation: ReservedSlot, version: int, to: int | None, sequence: int | None) -> int:
        """See ``ReservedSlot.commit``."""
        self._check_open()
        if not reservation.is_open:
            raise ChannelError(self.schema.name, "this slot was committed or cancelled before")
        number = self._sequence + 1 if sequence is None else sequence
        if version < 0 or number < 0:
            raise ValueError(f"version={version} and sequence={number} must not be negative")
        self._sequence = number
        words = self._words
        count = words[file_layout.COMMITTED] + 1
        # The slot first, then ``COMMITTED``: this one store commits. Killed before it, this process has sent nothing;
        # killed after it, a consumer that is attached reads the batch, posted or not.
        self._slots.commit(
            reservation.slot, count << file_layout.GENERATION_BITS, number, version, reservation.num_rows
        )
        words[file_layout.COMMITTED] = count
        words[file_layout.COMMITTED_ROWS] += reservation.num_rows
        words[file_layout.COMMITTED_BYTES] += reservation.num_rows * self._row_bytes
        words[file_layout.NEWEST_VERSION] = version
        if to is not None and self._is_open(to) and not self._queues[to].revoked:
            self._post(reservation.slot, to)
        else:
            self._enqueue_waiting([reservation.slot])
            self._post_waiting()
        return number

    def cancel(self, reservation: ReservedSlot) -> None:
        """See ``ReservedSlot.cancel``."""
        if os.getpid() != self._owner:
            return
        self._slots.set_free([reservation.slot])

    def message(self, slot: int, rows: int) -> memoryview:
        """The bytes of the Arrow message in a slot."""
        return self._slots.message(slot, rows)

    def update(self) -> None:
        """Free released slots and handle consumers that are gone. Every other call does this first."""
        self._check_open()
        self._update()

    def is_attached_to(self, queue: int, consumer_address: str) -> bool:
        """Whether this consumer is attached to that queue, alive at the last check, and open."""
        return self._is_open(queue) and self._queues[queue].endpoint == consumer_address

    def backlog(self, queue: int) -> int:
        """Batches that were posted to a queue and not released; as many as slots while its consumer is late."""
        if queue not in self._queues:
            return 0
        return self.slots if self._queues[queue].revoked else len(self._queues[queue].posted)

    def waiting(self) -> list[int]:
        """Sequence numbers of committed batches that were posted to no consumer, oldest first."""
        return [self._slots.sequence(slot) for slot in self._waiting]

    def unreleased(self) -> set[int]:
        """Sequence numbers of committed batches that are not released."""
        posted = {self._slots.sequence(slot) for queue in self._queues.values() for slot in queue.posted}
        return posted | {*self.waiting()}

    def post(self, sequence: int, queue: int) -> None:
        """Post a waiting batch to a consumer's queue."""
        self._post(self._unqueue(sequence), queue)

    def drop(self, sequence: int) -> None:
        """Free the slot of a waiting batch that another route has delivered, or that is not needed any more."""
        self._slots.set_free([self._unqueue(sequence)])

    def encoded_batch(self, sequence: int) -> EncodedBatch:
        """A waiting batch as bytes; valid until it is dropped."""
        return self._slots.encoded_batch(self._waiting_slot(sequence))

    def drain(self, timeout_s: float) -> int:
        """Wait until consumers have released everything. Returns how many batches are not released at the time limit."""
        self._check_open()
        with suppress(ChannelTimeoutError):
            self._wait_until(lambda: not self._unreleased_count(), timeout_s)
        return self._unreleased_count()

    def close(self, timeout_s: float = 1.0) -> None:
        """Wait until every consumer has mapped this ring, then close it. Safe to call twice.

        Consumers that have mapped it still read what was posted to them. But a batch whose consumer ends without
        releasing it is not posted again: call ``drain`` first where that matters.
        """
        if self._closed or os.getpid() != self._owner:  # a forked child's copy: the ring is its parent's
            return
        queues = self._queues.values()
        with suppress(ChannelTimeoutError):
            self._wait_until(
                lambda: not self._waiting and all(queue.is_attached for queue in queues), timeout_s
            )
        lost = len(self._waiting) + sum(len(queue.posted) for queue in queues if not queue.is_attached)
        if lost:
            _logger.warning(
                "channel %r: producer %d closed with %d undelivered batches",
                self.schema.name,
                self.producer,
                lost,
            )
        self._closed = True
        self._words[file_layout.CLOSED] = 1
        for queue in queues:
            queue.notify_consumer()
        self._queues = {}
        self._processes.close()
        self._file.close()

    def _update(self) -> None:
        """Free released slots, requeue batches of consumers that are gone, and post waiting batches."""
        # Check processes first and releases second: an ended process releases nothing between the two.
        ended = self._processes.ended()
        for number, queue in list(self._queues.items()):
            # Likewise before its queue is read: a closed consumer takes nothing more.
            is_closed = queue.is_closed
            self._slots.set_free(queue.collect_released())
            # A dead consumer loses all its unreleased batches; a closed one may still release those it has taken.
            if queue.pid in ended:
                self._requeue_unreleased(queue, list(queue.posted))
            elif is_closed:
                self._requeue_unreleased(queue, queue.untaken())
                queue.forget_untaken_revoked()
            elif self._lease_s is not None and len(self._queues) > 1 and self._has_other(number):
                self._requeue_revoked(queue.revoke_expired(self._lease_s))
            if queue.pid in ended or (is_closed and not queue.posted and not queue.revoked):
                queue.detach()
                del self._queues[number]
                self._processes.watch_only(queue.pid for queue in self._queues.values())
        self._post_waiting()

    def _has_other(self, number: int) -> bool:
        """Whether another consumer could take this one's batches."""
        queues = self._queues.items()
        return any(other != number and not queue.is_closed and not queue.revoked for other, queue in queues)

    def _post_waiting(self) -> None:
        """Post waiting batches, each to the open consumer with the least backlog, as long as that one has credit."""
        while self._waiting and not self._routed:
            open_queues = [number for number in self._queues if self._is_open(number)]
            number = min(open_queues, key=self.backlog, default=-1)
            if number < 0 or self.backlog(number) >= self._credit:
                return
            self._post(self._waiting.pop(0), number)

    def _requeue_unreleased(self, queue: SpscQueue, slots: list[int]) -> None:
        """Take batches back from a consumer that is gone; they go to other consumers before younger ones."""
        for slot in slots:
            del queue.posted[slot]
        self._enqueue_waiting(slots)
        self._words[file_layout.REPOSTED] += len(slots)

    def _requeue_revoked(self, slots: list[int]) -> None:
        self._enqueue_waiting(slots)
        for slot in slots:
            self._slots.renew_ticket(slot)
        self._words[file_layout.REPOSTED] += len(slots)

    def _enqueue_waiting(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.set_state(slot, file_layout.STATE_WAITING)
        self._waiting = sorted([*self._waiting, *slots], key=self._slots.ticket)

    def _unqueue(self, sequence: int) -> int:
        slot = self._waiting_slot(sequence)
        self._waiting.remove(slot)
        return slot

    def _waiting_slot(self, sequence: int) -> int:
        return next(slot for slot in self._waiting if self._slots.sequence(slot) == sequence)

    def _post(self, slot: int, queue: int) -> None:
        self._queues[queue].post(slot, self._slots.ticket(slot))

    def _wait_for_slot(self, timeout_s: float) -> None:
        begin_ns = self._words[file_layout.BLOCKED_SINCE_NS] = time.monotonic_ns()
        try:
            self._wait_until(lambda: bool(self._slots.free), timeout_s)
        finally:
            self._words[file_layout.BLOCKED_NS] += time.monotonic_ns() - begin_ns
            self._words[file_layout.BLOCKED_SINCE_NS] = 0

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        waited = WaitedTime()
        while True:
            # Load the futex word before checking: a release in between changes it, and ``futex.sleep`` returns.
            freed = self._words[file_layout.FREED]
            self._update()
            if done():
                return
            waited_s = waited.look()
            if waited_s >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._timeout_detail(), waited_s)
            futex.sleep(
                self._file.word_address(file_layout.FREED), freed, min(_SLEEP_S, timeout_s - waited_s)
            )

    def _timeout_detail(self) -> str:
        states = [f"process {queue.pid} holds {len(queue.posted)}" for queue in self._queues.values()]
        filled = self.slots - len(self._slots.free) - self._unreleased_count()
        states += [f"{len(self._waiting)} wait for a consumer"] if self._waiting else []
        states += [f"{filled} are being filled"] if filled else []
        attached = "" if self._queues else "no consumer is attached; "
        return f"of {counted(self.slots, 'slot')} of producer {self.producer}, {attached}{', '.join(states)}"

    def _unreleased_count(self) -> int:
        return len(self._waiting) + sum(len(queue.posted) for queue in self._queues.values())

    def _is_open(self, queue: int) -> bool:
        return queue in self._queues and not self._queues[queue].is_closed

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, f"the ring of producer {self.producer} is closed")

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit consumers detect the end of the process
            self.close(timeout_s=0.0)
