"""Single-producer single-consumer queue of slot numbers, seen from the producer.

The producer writes owner, tail and entries; the consumer writes head, attach ack and released tickets. See
``file_layout``; the consumer's side is ``batch.ProducerLink``.
"""

from __future__ import annotations

import time

from collectives import futex
from collectives.experience import file_layout
from collectives.experience.descriptors import send_descriptor
from collectives.experience.errors import ChannelError
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.schema import ExperienceSchema
from collectives.shared_words import SharedWords


class SpscQueue:
    """One attached consumer, until its process has ended, or it is closed and has released everything."""

    def __init__(
        self, channel: str, ring_file: SharedFile, shape: RingLayout, number: int, consumer_file: SharedFile
    ) -> None:
        """Assign this queue to the consumer, which finds it by the owner word."""
        self.pid, self.endpoint = file_layout.pid_of(consumer_file.endpoint), consumer_file.endpoint
        self._channel = channel
        self.posted: dict[int, int] = {}
        """Ticket by slot, of slots that were posted and not released as far as is known."""
        self.revoked: dict[int, int] = {}
        """Ticket by slot, of batches that were revoked, and of which the consumer does not know that so far."""
        self._held_since_s: dict[int, float] = {}
        """By posted slot: when it was taken, or when this consumer, which has not taken it, took another."""
        self._head = 0
        """As last loaded by ``revoke_expired``."""
        self._words, self._shape, self._number, self._file = ring_file.words, shape, number, ring_file
        self._begin = begin = shape.queue_word(number)
        # Of each post and release: computed once.
        self._released, self._voided, self._claims = (
            begin + at for at in (shape.released_at, shape.voided_at, shape.claims_at)
        )
        self._entries, self._places = begin + file_layout.QUEUE_AT, shape.places
        self._states = [shape.slot_word(slot) + file_layout.SLOT_STATE for slot in range(shape.slots)]
        self._consumer_file = consumer_file
        self._producer = ring_file.words[file_layout.PRODUCER]
        self._num_notifications = 0
        # Clear what a former consumer left; the owner word is stored last and makes the queue visible.
        for word in range(begin, begin + shape.queue_words):
            self._words[word] = 0
        self._words[begin + file_layout.QUEUE_OWNER] = file_layout.word_of(consumer_file.endpoint)

    @property
    def is_closed(self) -> bool:
        """Whether the consumer is closed. It may still release what it has taken."""
        return bool(self._consumer_file.words[file_layout.CONSUMER_CLOSED])

    @property
    def is_attached(self) -> bool:
        """Whether the consumer has mapped the producer ring."""
        return bool(self._words[self._begin + file_layout.ATTACH_ACK])

    def request_connection(self, ring_file: SharedFile) -> None:
        """Send the ring's descriptor to the consumer, then set its connect request.

        From then on the ring's memory outlives this process, even if the consumer does not run now.

        Raises:
            ChannelError: the consumer no longer exists.
        """
        assert ring_file.descriptor is not None
        try:
            send_descriptor(self._consumer_file.words[file_layout.CONSUMER_TOKEN], ring_file.descriptor)
        except OSError as error:
            raise ChannelError(
                self._channel, f"cannot connect to {self.endpoint}: {error.strerror}"
            ) from error
        self._consumer_file.words[file_layout.CONNECT_REQUESTS_AT + self._producer] = file_layout.word_of(
            ring_file.endpoint
        )
        self.notify_consumer()

    def post(self, slot: int, ticket: int) -> None:
        """Put a committed slot into the consumer's queue, and wake it."""
        words, begin = self._words, self._begin
        self.posted[slot] = ticket
        self._held_since_s[slot] = time.monotonic()
        words[self._claims + slot] = 0  # the consumer is done with the batch before in this slot
        tail = words[begin + file_layout.TAIL]
        # The entry first, then the state, then the tail that publishes the entry: if this process is killed in between,
        # the entry at the tail tells that the slot was not posted. So the place at the next tail is cleared before: its
        # entry was taken, but its batch may be held still. No entry is overwritten before it is taken: a queue has more
        # entries than the ring has slots, and a slot is posted once until it is released.
        words[self._entries + tail % self._places] = ticket << file_layout.SLOT_BITS | slot
        words[self._states[slot]] = file_layout.STATE_POSTED + self._number
        words[self._entries + (tail + 1) % self._places] = 0
        words[begin + file_layout.TAIL] = tail + 1
        self.notify_consumer()

    def collect_released(self) -> list[int]:
        """Remove and return the slots that the consumer has released."""
        released = self._released
        # By ticket, not by slot: a late release of an earlier batch in the same slot does not count.
        freed = [slot for slot, ticket in self.posted.items() if self._words[released + slot] == ticket]
        for slot in freed:
            del self.posted[slot]
        if self.revoked:
            late = self.revoked.items()
            self.revoked = {
                slot: ticket for slot, ticket in late if self._words[self._voided + slot] != ticket
            }
        return freed

    def revoke_expired(self, lease_s: float) -> list[int]:
        """Take back batches that the consumer has held, or left untaken while it took no other, for ``lease_s``."""
        now_s, words = time.monotonic(), self._words
        head, tail = words[self._begin + file_layout.HEAD], words[self._begin + file_layout.TAIL]
        if head != self._head:
            # It has taken one: the lease begins anew for that one, and for those behind it. The place at the tail is none.
            for place in range(max(self._head, tail + 1 - self._places), tail):
                self._held_since_s[
                    words[self._entries + place % self._places] & file_layout.MAX_SLOTS - 1
                ] = now_s
            self._head = head
        taken_back = [
            slot
            for slot, ticket in self.posted.items()
            if now_s - self._held_since_s[slot] >= lease_s
            and ticket & file_layout.LAST_GENERATION != file_layout.LAST_GENERATION
            # Either this claim succeeds, and the consumer's fails when it releases the batch; or the reverse.
            and futex.claim(self._file.word_address(self._claims + slot))
        ]
        for slot in taken_back:
            self.revoked[slot] = self.posted.pop(slot)
        return taken_back

    def forget_untaken_revoked(self) -> None:
        """After the consumer closed: it finds no revoked batch any more that it has not taken."""
        for entry in untaken_entries(self._words, self._shape, self._number):
            slot, ticket = file_layout.slot_and_ticket(entry)
            if self.revoked.get(slot) == ticket:
                del self.revoked[slot]

    def untaken(self) -> list[int]:
        """Slots between head and tail: posted and not taken."""
        entries = untaken_entries(self._words, self._shape, self._number)
        queued = [file_layout.slot_and_ticket(entry) for entry in entries]
        return [slot for slot, ticket in queued if self.posted.get(slot) == ticket]

    def notify_consumer(self) -> None:
        """Wake the consumer if it sleeps."""
        self._num_notifications += 1
        # A value that no other producer stores and this one did not store last: a sleeper sees a change.
        self._consumer_file.words[file_layout.DOORBELL] = (
            self._producer << 24 | self._num_notifications & 0xFFFFFF
        )
        futex.wake(self._consumer_file.word_address(file_layout.DOORBELL))

    def detach(self) -> None:
        """Free this queue for another consumer."""
        self._words[self._begin + file_layout.QUEUE_OWNER] = 0


def untaken_entries(words: SharedWords, shape: RingLayout, number: int) -> list[int]:
    """Entries of a queue between head and tail."""
    begin = shape.queue_word(number)
    # A consumer that takes one meanwhile advances the head only; entries below the tail are not overwritten.
    places = range(words[begin + file_layout.HEAD], words[begin + file_layout.TAIL])
    return [words[begin + file_layout.QUEUE_AT + place % shape.places] for place in places]


def open_consumer_file(
    schema: ExperienceSchema, endpoint: str, producer: int, ring_endpoint: str
) -> SharedFile:
    """Map a consumer's file, and check that this ring may connect to it.

    Raises:
        ChannelError: the consumer no longer exists, or has another live producer of this number.
        SchemaError: the consumer expects another schema.
    """
    consumer_file = SharedFile.open(schema.name, endpoint, file_layout.CONSUMER_MAGIC)
    message = consumer_file.bytes[file_layout.CONSUMER_SCHEMA_AT :][
        : consumer_file.words[file_layout.CONSUMER_SCHEMA_BYTES]
    ]
    schema.refuse_other(
        file_layout.read_schema(message), f"the consumer of process {file_layout.pid_of(endpoint)}"
    )
    connect_request = consumer_file.words[file_layout.CONNECT_REQUESTS_AT + producer]
    if not connect_request or connect_request == file_layout.word_of(ring_endpoint):
        return consumer_file
    try:
        other = SharedFile.open(schema.name, file_layout.endpoint_in(connect_request), file_layout.RING_MAGIC)
    except ChannelError:  # a former producer of this number, which has ended
        return consumer_file
    if other.words[file_layout.CLOSED]:
        return consumer_file
    raise ChannelError(
        schema.name,
        f"process {file_layout.pid_of(other.endpoint)} is its producer {producer} already: give each a number of its own",
    )
