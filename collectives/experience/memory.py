"""The two files of a channel: who writes which word where.

An outbox is its producer's: a header, a line per consumer, then slots. An inbox is its consumer's: one page with a bell and
a word per producer that knocks. Every word has one writer, but for bells: there any change will do, and no two writers
write the same value.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Self

import pyarrow as pa
import torch

from collectives.experience.errors import ChannelError
from collectives.experience.schema import ExperienceSchema
from collectives.transports.shm.memory import CACHE_LINE_BYTES, back_with_memory, is_supported, page_aligned

FILE_PREFIX = "rayagi-channel:"
OUTBOX_MAGIC = 0x3130584F42594152
INBOX_MAGIC = 0x3130584E49594152
MAX_CONSUMERS = 16
"""That are attached to one outbox at a time."""
MAX_PRODUCERS = 256
"""That one inbox can tell apart."""
WORD = 8
LINE = CACHE_LINE_BYTES // WORD

# Header of an outbox, in words.
MAGIC, PID, PRODUCER, ROWS, SLOTS, STRIDE, SLOTS_AT, CLOSED, SCHEMA_BYTES, ORIGIN = range(10)
POSTED, POSTED_ROWS, POSTED_BYTES, BLOCKED_NS, SEQUENCE, REPOSTED = range(2 * LINE, 2 * LINE + 6)
"""Counts since the beginning, for whoever looks on."""
FREED = 4 * LINE
"""The bell that consumers ring when they release."""
CONSUMERS_AT = 6 * LINE

# Line of a consumer in an outbox: a cache line that the producer writes, one that the consumer writes, two rings.
CONSUMER_PID, TAIL, INBOX_FILE = 0, 1, 2
HEAD, ATTACHED, RELEASED_COUNT = LINE, LINE + 1, LINE + 2
QUEUE_AT = 2 * LINE

# Header of a slot.
SLOT_SEQUENCE, SLOT_VERSION, SLOT_ROWS, SLOT_TIME_NS = range(4)
SLOT_HEADER_BYTES = CACHE_LINE_BYTES

# Header of an inbox.
INBOX_PID, INBOX_CLOSED, INBOX_SCHEMA_BYTES, BELL = 1, 2, 3, LINE
KNOCKS_AT = 2 * LINE


@dataclass(frozen=True, slots=True)
class OutboxShape:
    """Sizes that follow from an outbox's numbers."""

    slots: int
    slot_stride: int
    """Bytes from one slot to the next: its header and its message, in whole cache lines."""
    schema_bytes: int

    @property
    def line_words(self) -> int:
        """Of a consumer's line: each ring has a word per slot, and its end is a cache line's."""
        ring = -(-self.slots // LINE) * LINE
        return QUEUE_AT + 2 * ring

    @property
    def released_at(self) -> int:
        """Word within a consumer's line where the numbers of released batches begin."""
        return QUEUE_AT + -(-self.slots // LINE) * LINE

    @property
    def schema_at(self) -> int:
        """Byte at which the schema message begins."""
        return (CONSUMERS_AT + MAX_CONSUMERS * self.line_words) * WORD

    @property
    def slots_at(self) -> int:
        """Byte at which the slots begin."""
        return page_aligned(self.schema_at + self.schema_bytes)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return page_aligned(self.slots_at + self.slots * self.slot_stride)

    def line(self, consumer: int) -> int:
        """Word at which a consumer's line begins."""
        return CONSUMERS_AT + consumer * self.line_words


def slot_stride(message_bytes: int) -> int:
    """Bytes of a slot that holds such a message."""
    lines = -(-message_bytes // CACHE_LINE_BYTES)
    return SLOT_HEADER_BYTES + lines * CACHE_LINE_BYTES


class SharedFile:
    """A file without a name, mapped: as words, and as bytes. It goes with the last process that maps it."""

    def __init__(self, descriptor: int, size: int) -> None:
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.descriptor: int | None = descriptor
        self.bytes = memoryview(memory)
        self.words = self.bytes.cast("Q")
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self.endpoint = f"/proc/{os.getpid()}/fd/{descriptor}"

    @classmethod
    def create(cls, channel: str, size: int) -> Self:
        """Make a zeroed file.

        Raises:
            ChannelError: there is no memory for it, or this host cannot.
        """
        if not is_supported():
            raise ChannelError(channel, "shared memory channels need Linux on x86-64")
        descriptor = os.memfd_create(f"{FILE_PREFIX}{channel}"[:200], os.MFD_CLOEXEC)
        try:
            back_with_memory(descriptor, 0, size)
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise ChannelError(
                channel,
                f"no {size / 2**20:.1f} MiB for it ({error.strerror}): use fewer slots or smaller batches",
            ) from error

    @classmethod
    def open(cls, channel: str, endpoint: str, magic: int) -> Self:
        """Map a file that another process made.

        Raises:
            ChannelError: it is not there any more, is another's, or something else.
        """
        try:
            descriptor = os.open(endpoint, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ChannelError(channel, f"cannot open {endpoint}: {error.strerror}") from error
        try:
            opened = cls(descriptor, os.fstat(descriptor).st_size)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise ChannelError(channel, f"cannot map {endpoint}: {error}") from error
        if opened.words[MAGIC] != magic:
            opened.close()
            raise ChannelError(channel, f"{endpoint} is no channel of this version of rayagi")
        opened.close()  # the mapping stays
        return opened

    def word_address(self, word: int) -> int:
        """Where a word is, for those who sleep on it."""
        return self.address + word * WORD

    def close(self) -> None:
        """Close the descriptor; the mapping stays until nothing refers to it. Safe to call twice."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def pid_of(endpoint: str) -> int:
    """The process that made the file at an endpoint."""
    return int(endpoint.split("/")[2])


def descriptor_of(endpoint: str) -> int:
    """Its descriptor there."""
    return int(endpoint.split("/")[4])


def endpoint_of(pid: int, descriptor: int) -> str:
    """Where another process opens a file."""
    return f"/proc/{pid}/fd/{descriptor}"


def pid_and_file(endpoint: str) -> int:
    """An endpoint in one word, which is stored at once."""
    return pid_of(endpoint) << 32 | descriptor_of(endpoint)


def endpoint_in(word: int) -> str:
    """Inverse of ``pid_and_file``."""
    return endpoint_of(word >> 32, word & 0xFFFFFFFF)


def read_schema(message: memoryview) -> ExperienceSchema:
    """The schema of a message that an end of a channel keeps."""
    return ExperienceSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(message)))
