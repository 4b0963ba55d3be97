"""The two files of a channel: who writes which word where.

An outbox is its producer's: a header, a line per consumer, then slots. An inbox is its consumer's: one page with a bell and
a word per producer that knocks. Every word has one writer, but for bells: there any change will do, and no two writers
write the same value. What is published by a store comes before it in program order, and is seen so (``shared_words``).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import pyarrow as pa
import torch

from collectives.experience.errors import ChannelError
from collectives.experience.schema import ExperienceSchema
from collectives.shared_words import shared_words, unsupported_reason
from collectives.transports.shm.memory import CACHE_LINE_BYTES, page_aligned, preallocate

FILE_PREFIX = "rayagi-channel:"
RING_MAGIC = 0x3130584F42594152
CONSUMER_MAGIC = 0x3130584E49594152
MAX_CONSUMERS = 16
"""That are attached to one outbox at a time."""
MAX_PRODUCERS = 256
"""That one inbox can tell apart."""
WORD = 8
LINE = CACHE_LINE_BYTES // WORD

# Header of an outbox, in words. The magic number is written last.
MAGIC, PID, PRODUCER, ORIGIN, ROWS, SLOTS, STRIDE, SCHEMA_BYTES, CLOSED = range(9)
COMMITTED, COMMITTED_ROWS, COMMITTED_BYTES, REPOSTED, NEWEST_VERSION, BLOCKED_NS, BLOCKED_SINCE_NS = range(
    2 * LINE, 2 * LINE + 7
)
"""Since the beginning, for whoever looks on. A batch's ticket is its number as ``COMMITTED`` counts. The producer waits for
a slot since a time of the monotonic clock, or does not (0)."""
FREED = 4 * LINE
"""The bell that consumers ring when they release."""
CONSUMERS_AT = 6 * LINE

# Line of a consumer in an outbox: a cache line that the producer writes, one that the consumer writes, and two rings: the
# producer's queue of slots, and the consumer's tickets of what it has released, by slot.
QUEUE_OWNER, TAIL = 0, 1
HEAD, ATTACH_ACK = LINE, LINE + 1
QUEUE_AT = 2 * LINE

# Header of a slot, written by the producer. The ticket is 0 while the slot is being filled, and is written last.
SLOT_TICKET, SLOT_SEQUENCE, SLOT_VERSION, SLOT_ROWS, SLOT_TIME_NS, SLOT_STATE = range(6)
SLOT_HEADER_BYTES = CACHE_LINE_BYTES
STATE_FREE, STATE_RESERVED, STATE_WAITING, STATE_POSTED = range(4)
"""Where a slot is, for whoever looks on; ``STATE_POSTED + line`` once it was posted to a consumer."""

# Header of an inbox.
CONSUMER_PID, CONSUMER_CLOSED, CONSUMER_SCHEMA_BYTES, DOORBELL = 1, 2, 3, LINE
CONNECT_REQUESTS_AT = 2 * LINE
CONSUMER_SCHEMA_AT = (CONNECT_REQUESTS_AT + MAX_PRODUCERS) * WORD
"""Byte at which an inbox's schema message begins."""

_INODE_BITS, _FD_BITS = 22, 20
"""Of the word that names a file; the process has the other 22, which is as many as Linux ever uses."""


@dataclass(frozen=True)
class RingLayout:
    """Sizes that follow from an outbox's numbers."""

    slots: int
    slot_stride: int
    """Bytes from one slot to the next: its header and its message, in whole cache lines."""
    schema_bytes: int

    @cached_property
    def released_at(self) -> int:
        """Word within a consumer's line where the tickets of released batches begin, by slot."""
        return QUEUE_AT + -(-self.slots // LINE) * LINE

    @cached_property
    def queue_words(self) -> int:
        """Of a consumer's line: each ring has a word per slot, and its end is a cache line's."""
        return 2 * self.released_at - QUEUE_AT

    @cached_property
    def schema_at(self) -> int:
        """Byte at which the schema message begins."""
        return (CONSUMERS_AT + MAX_CONSUMERS * self.queue_words) * WORD

    @cached_property
    def slots_at(self) -> int:
        """Byte at which the slots begin."""
        return page_aligned(self.schema_at + self.schema_bytes)

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return page_aligned(self.slots_at + self.slots * self.slot_stride)

    def queue_word(self, consumer: int) -> int:
        """Word at which a consumer's line begins."""
        return CONSUMERS_AT + consumer * self.queue_words

    def slot_word(self, slot: int) -> int:
        """Word at which a slot's header begins."""
        return (self.slots_at + slot * self.slot_stride) // WORD


def slot_stride(message_bytes: int) -> int:
    """Bytes of a slot that holds such a message, wherever in its first cache line it begins."""
    lines = -(-message_bytes // CACHE_LINE_BYTES)
    return SLOT_HEADER_BYTES + CACHE_LINE_BYTES + lines * CACHE_LINE_BYTES


class SharedFile:
    """A file without a name, mapped: as words, and as bytes. It goes with the last process that maps it.

    Its endpoint says its inode too: a descriptor's number is used again once it is closed.
    """

    descriptor: int | None = None
    """What others open; None in those who did. The mapping holds another."""

    def __init__(self, descriptor: int, endpoint: str) -> None:
        size = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.endpoint = endpoint
        self.bytes = memoryview(memory)
        self.words = shared_words(self.bytes.cast("Q"))
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()

    @classmethod
    def create(cls, channel: str, size: int) -> Self:
        """Make a zeroed file of whole pages.

        Raises:
            ChannelError: there is no memory for it, or this host cannot.
        """
        if reason := unsupported_reason():
            raise ChannelError(channel, reason)
        try:
            descriptor = os.memfd_create(f"{FILE_PREFIX}{channel}", os.MFD_CLOEXEC)
            try:
                preallocate(descriptor, 0, page_aligned(size))
                inode = os.fstat(descriptor).st_ino
                made = cls(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}#{inode}")
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise ChannelError(
                channel,
                f"no {size / 2**20:.1f} MiB for it ({error.strerror}): use fewer slots or smaller batches",
            ) from error
        made.descriptor = descriptor
        return made

    @classmethod
    def open(cls, channel: str, endpoint: str, magic: int) -> Self:
        """Map a file that another process made.

        Raises:
            ChannelError: it is not there any more, is another's, or something else.
        """
        path, _, inode = endpoint.partition("#")
        try:
            if not os.readlink(path).startswith(
                f"/memfd:{FILE_PREFIX}"
            ):  # opening could mean more than reading
                raise ChannelError(channel, f"{endpoint} is not there any more")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ChannelError(channel, f"cannot open {endpoint}: {error.strerror}") from error
        try:
            if _low(os.fstat(descriptor).st_ino) != _low(int(inode)):
                raise ChannelError(channel, f"{endpoint} is not there any more")
            opened = cls(descriptor, endpoint)
        except (OSError, ValueError) as error:
            raise ChannelError(channel, f"cannot map {endpoint}: {error}") from error
        finally:
            os.close(descriptor)  # the mapping stays
        if opened.words[MAGIC] != magic:
            raise ChannelError(channel, f"{endpoint} is no channel of this version of rayagi")
        return opened

    def word_address(self, word: int) -> int:
        """Where a word is, for those who sleep on it."""
        return self.address + word * WORD

    def close(self) -> None:
        """Close the descriptor: nobody can open it any more. The mapping stays until nothing refers to it.

        Safe to call twice.
        """
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        self.close()


def pid_of(endpoint: str) -> int:
    """The process that made the file at an endpoint."""
    return int(endpoint.split("/")[2])


def word_of(endpoint: str) -> int:
    """An endpoint in one word, which is stored at once: process, descriptor, lower bits of the inode."""
    path, _, inode = endpoint.partition("#")
    descriptor = int(path.rsplit("/", 1)[1])
    return (pid_of(endpoint) << _FD_BITS | descriptor) << _INODE_BITS | _low(int(inode))


def endpoint_in(word: int) -> str:
    """Inverse of ``word_of``."""
    descriptor = word >> _INODE_BITS & 2**_FD_BITS - 1
    return f"/proc/{word >> _INODE_BITS + _FD_BITS}/fd/{descriptor}#{_low(word)}"


def _low(inode: int) -> int:
    return inode & 2**_INODE_BITS - 1


def read_schema(message: memoryview) -> ExperienceSchema:
    """The schema of a message that an end of a channel keeps."""
    return ExperienceSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(message)))
