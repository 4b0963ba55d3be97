"""A producer's side of one consumer: the queue of what was posted to it, and which of it was released."""

from __future__ import annotations

from collectives import futex
from collectives.experience import memory as at
from collectives.experience.errors import ChannelError
from collectives.experience.memory import OutboxShape, SharedFile
from collectives.experience.schema import ExperienceSchema


class Line:
    """One consumer of an outbox, from ``attach`` until it has ended, or is closed and has released all."""

    def __init__(self, outbox: SharedFile, shape: OutboxShape, number: int, inbox: SharedFile) -> None:
        """Take this line of the outbox for the consumer; it is found by the word that names its inbox."""
        self.pid, self.endpoint = at.pid_of(inbox.endpoint), inbox.endpoint
        self.posted: dict[int, int] = {}
        """Ticket of each slot that was posted and not seen released."""
        self._words, self._slots = outbox.words, shape.slots
        self._begin = begin = shape.line(number)
        self._released = begin + shape.released_at
        self._inbox = inbox
        self._producer = outbox.words[at.PRODUCER]
        self._rings = 0
        for word in range(begin, begin + shape.line_words):
            self._words[word] = 0
        self._words[begin + at.CONSUMER_INBOX] = at.word_of(inbox.endpoint)

    @property
    def is_closed(self) -> bool:
        """Whether the consumer takes no more. It may still release what it has taken."""
        return bool(self._inbox.words[at.INBOX_CLOSED])

    @property
    def is_found(self) -> bool:
        """Whether the consumer has mapped the outbox."""
        return bool(self._words[self._begin + at.FOUND])

    def knock(self, outbox_endpoint: str) -> None:
        """Tell the consumer where this outbox is."""
        self._inbox.words[at.KNOCKS_AT + self._producer] = at.word_of(outbox_endpoint)
        self.ring()

    def post(self, slot: int, ticket: int) -> None:
        """Put a committed slot into the consumer's queue, and wake it."""
        words, begin = self._words, self._begin
        self.posted[slot] = ticket
        tail = words[begin + at.TAIL]
        words[begin + at.QUEUE_AT + tail % self._slots] = slot
        words[begin + at.TAIL] = tail + 1
        self.ring()

    def take_in(self) -> list[int]:
        """Slots that the consumer has released since, which are free."""
        released = self._released
        freed = [slot for slot, ticket in self.posted.items() if self._words[released + slot] == ticket]
        for slot in freed:
            del self.posted[slot]
        return freed

    def untaken(self) -> list[int]:
        """Slots that the consumer has not taken: of one that is closed, what it never will."""
        begin, words = self._begin, self._words
        places = range(words[begin + at.HEAD], words[begin + at.TAIL])
        queued = [words[begin + at.QUEUE_AT + place % self._slots] for place in places]
        return [slot for slot in queued if slot in self.posted]

    def ring(self) -> None:
        """Wake the consumer if it sleeps."""
        self._rings += 1
        self._inbox.words[at.BELL] = self._producer << 24 | self._rings & 0xFFFFFF
        futex.wake(self._inbox.word_address(at.BELL))

    def give_up(self) -> None:
        """Let another consumer have this line."""
        self._words[self._begin + at.CONSUMER_INBOX] = 0


def open_inbox(schema: ExperienceSchema, endpoint: str, producer: int, outbox_endpoint: str) -> SharedFile:
    """An inbox that this outbox may knock at.

    Raises:
        ChannelError: it is not there any more, or has another producer of this number that is alive.
        SchemaError: it expects something else.
    """
    inbox = SharedFile.open(schema.name, endpoint, at.INBOX_MAGIC)
    message = inbox.bytes[at.INBOX_SCHEMA_AT :][: inbox.words[at.INBOX_SCHEMA_BYTES]]
    schema.refuse_other(at.read_schema(message), f"the consumer of process {at.pid_of(endpoint)}")
    knock = inbox.words[at.KNOCKS_AT + producer]
    if not knock or knock == at.word_of(outbox_endpoint):
        return inbox
    try:
        other = SharedFile.open(schema.name, at.endpoint_in(knock), at.OUTBOX_MAGIC)
    except ChannelError:  # the one that had this number before, and has left
        return inbox
    if other.words[at.CLOSED]:
        return inbox
    raise ChannelError(
        schema.name,
        f"process {at.pid_of(other.endpoint)} is its producer {producer} already: give each a number of its own",
    )
