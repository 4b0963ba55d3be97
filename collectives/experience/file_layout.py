"""Layout of a channel's two shared-memory files: which word is where, and which process writes it.

The producer creates a ring file: header, one SPSC queue per consumer, slots. The consumer creates a file of one page: a
doorbell and one connect request per producer. Every word has a single writer, except claims (``futex.claim``) and the two
futex words (``FREED``, ``DOORBELL``): any change wakes their sleeper, and no two writers store the same value there.

Memory order: the writer stores data first and then the word that publishes it (a release), the reader loads that word first
and then the data (an acquire); ``shared_words`` keeps this order on every processor. So a writer that is killed between two
stores leaves a prefix of them, and each prefix has one meaning:

- commit: fields and header of a slot, its ticket, then ``COMMITTED``. A batch exists if ``COMMITTED`` reached its ticket.
- post: the queue's entry, the slot's state, then ``TAIL``. A slot whose entry lies at ``TAIL`` was not posted.
- release: the ticket in ``released``. A committed slot is in use unless it is free or some consumer released its ticket.
- revocation: the claim, state waiting, then a new ticket. The consumer that lost the claim says so at ``voided_at``.
- reuse: state free, later ticket 0, then state reserved: no old ticket is seen in a slot that is being filled.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import sys
from typing import Self
from weakref import WeakSet

import pyarrow as pa
import torch

from collectives.experience.errors import ChannelError
from collectives.experience.schema import ExperienceSchema
from collectives.page_locking import page_lock, unlock
from collectives.shared_words import SharedWords, shared_words, unsupported_reason
from collectives.transports.shm.memory import CACHE_LINE_BYTES, page_aligned, preallocate

_logger = logging.getLogger(__name__)

FILE_PREFIX = "rayagi-channel:"
RING_MAGIC = 0x3230584F42594152
CONSUMER_MAGIC = 0x3230584E49594152
MAX_CONSUMERS = 16
"""Attached to one producer ring at a time."""
MAX_PRODUCERS = 256
"""Of one consumer: it has one connect-request word for each."""
GENERATION_BITS = 8
"""Bits of a ticket that count how often its batch was revoked; the others are the number of its commit."""
LAST_GENERATION = 2**GENERATION_BITS - 1
SLOT_BITS = 16
"""Bits of a slot's number in a queue's entry; the others hold the batch's ticket."""
MAX_SLOTS = 2**SLOT_BITS
WORD = 8
"""Bytes."""
LINE = CACHE_LINE_BYTES // WORD
"""Words of a cache line."""

# Header of a producer ring, in words. Written by the producer: constants first, the magic number last of them.
MAGIC, PID, PRODUCER, ORIGIN, ROWS, SLOTS, STRIDE, SCHEMA_BYTES, CLOSED, HAS_LEASE = range(10)
"""``HAS_LEASE``: whether the producer may revoke batches, so that consumers claim each before they release it."""
COMMITTED, COMMITTED_ROWS, COMMITTED_BYTES, REPOSTED, NEWEST_VERSION, BLOCKED_NS, BLOCKED_SINCE_NS = range(
    2 * LINE, 2 * LINE + 7
)
"""Statistics since creation, written by the producer. ``COMMITTED`` counts commits: storing it is the commit. The others are
for ``inspection``. ``BLOCKED_SINCE_NS`` is the monotonic time since when the producer waits for a slot, else 0."""
FREED = 4 * LINE
"""Futex word that consumers change after a release; a blocked producer sleeps on it."""
CONSUMERS_AT = 6 * LINE

# SPSC queue of a consumer in a producer ring, by words from its begin. Writers are on cache lines of their own.
QUEUE_OWNER, TAIL = 0, 1
"""Written by the producer: endpoint of the consumer (0: the queue is free); number of slots posted so far."""
HEAD, ATTACH_ACK = LINE, LINE + 1
"""Written by the consumer: number of slots taken so far; 1 once it has mapped the ring file."""
QUEUE_AT = 2 * LINE
"""Entries (``entry_of``), at ``TAIL`` modulo ``RingLayout.places``; written by the producer. Behind them, at
``RingLayout.released_at``: the ticket that the consumer released last, for each slot; written by the consumer. Then, at
``voided_at``, the ticket of the batch that it last found revoked, for each slot. Then, at ``claims_at``, words by slot that
decide between release and revocation (``futex.claim``); the producer clears it before it posts."""

# Header of a slot, written by the producer. The ticket publishes the others: 0 while the slot is filled, and stored last.
SLOT_TICKET, SLOT_SEQUENCE, SLOT_VERSION, SLOT_ROWS, SLOT_TIME_NS, SLOT_STATE = range(6)
SLOT_HEADER_BYTES = CACHE_LINE_BYTES
STATE_FREE, STATE_RESERVED, STATE_WAITING, STATE_POSTED = range(4)
"""State of a slot; ``STATE_POSTED + queue`` once it was posted to a consumer. Read by ``inspection``, and by consumers after
the producer was killed."""

# Header of a consumer's file. Written by the consumer, except the doorbell (futex word, every producer) and the requests.
CONSUMER_PID, CONSUMER_CLOSED, CONSUMER_SCHEMA_BYTES, CONSUMER_TOKEN, DOORBELL = 1, 2, 3, 4, LINE
"""The token is the name of its ``DescriptorInbox``."""
CONNECT_REQUESTS_AT = 2 * LINE
"""One word per producer, written by that producer: the endpoint of its ring (``word_of``), or 0."""
CONSUMER_SCHEMA_AT = (CONNECT_REQUESTS_AT + MAX_PRODUCERS) * WORD
"""Byte at which the schema message of a consumer's file begins."""

_INODE_BITS, _FD_BITS = 22, 20
"""Bits of ``word_of``; the process has the other 22, as many as Linux uses at most."""


class RingLayout:
    """Offsets and sizes within a producer ring's file."""

    def __init__(self, slots: int, slot_stride: int, schema_bytes: int) -> None:
        """``slot_stride``: bytes from one slot to the next: its header and its message, in whole cache lines."""
        self.slots, self.slot_stride, self.schema_bytes = slots, slot_stride, schema_bytes
        self.places = slots + 1
        """Entries of one queue: one more than slots, so that the place at ``TAIL`` never holds an untaken entry."""
        by_slot = (
            -(-slots // LINE) * LINE
        )  # words of a table with one word for each slot, in whole cache lines
        self.released_at = QUEUE_AT + -(-self.places // LINE) * LINE
        """Word within a queue where the tickets of released batches begin, by slot."""
        self.voided_at = self.released_at + by_slot
        """Word within a queue where the tickets of revoked batches begin, by slot."""
        self.claims_at = self.voided_at + by_slot
        """Word within a queue where the claims begin, by slot."""
        self.queue_words = self.claims_at + by_slot
        """Words of one queue."""
        self.schema_at = (CONSUMERS_AT + MAX_CONSUMERS * self.queue_words) * WORD
        """Byte at which the schema message begins."""
        self.slots_at = page_aligned(self.schema_at + schema_bytes)
        """Byte at which the slots begin."""
        self.size = page_aligned(self.slots_at + slots * slot_stride)
        """Bytes of the file."""

    @classmethod
    def of(cls, words: SharedWords) -> Self:
        """That of a ring with this header."""
        return cls(words[SLOTS], words[STRIDE], words[SCHEMA_BYTES])

    def queue_word(self, consumer: int) -> int:
        """Word at which a consumer's queue begins."""
        return CONSUMERS_AT + consumer * self.queue_words

    def slot_word(self, slot: int) -> int:
        """Word at which a slot's header begins."""
        return (self.slots_at + slot * self.slot_stride) // WORD


def entry_of(slot: int, ticket: int) -> int:
    """A queue's entry for the batch of this ticket in a slot."""
    return ticket << SLOT_BITS | slot


def slot_and_ticket(entry: int) -> tuple[int, int]:
    """Inverse of ``entry_of``."""
    return entry & MAX_SLOTS - 1, entry >> SLOT_BITS


def slot_stride(message_bytes: int) -> int:
    """Bytes of a slot that holds a message of this size, which may begin anywhere in its first cache line."""
    lines = -(-message_bytes // CACHE_LINE_BYTES)
    return SLOT_HEADER_BYTES + CACHE_LINE_BYTES + lines * CACHE_LINE_BYTES


class SharedFile:
    """A memfd, mapped as words and as bytes. The kernel frees it with the last process that maps it.

    The endpoint contains the inode, because descriptor numbers are reused after ``close``.
    """

    _is_page_locked = False
    descriptor: int | None = None
    """In the process that created it, or received it: other processes open it through /proc. The mapping holds its own."""

    def __init__(self, descriptor: int, endpoint: str) -> None:
        size = os.fstat(descriptor).st_size
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.endpoint = endpoint
        self.bytes = memoryview(memory)
        self.words = shared_words(self.bytes.cast("Q"))
        self.address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()

    @classmethod
    def create(cls, channel: str, size: int) -> Self:
        """Create a zeroed file of whole pages.

        Raises:
            ChannelError: there is not enough memory, or this host is not supported.
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
        """Map a file that another process created.

        Raises:
            ChannelError: the file no longer exists, cannot be opened, or is of another kind.
        """
        path, _, inode = endpoint.partition("#")
        try:
            # Check before opening: opening a device file could have side effects.
            if not os.readlink(path).startswith(f"/memfd:{FILE_PREFIX}"):
                raise ChannelError(channel, f"{endpoint} no longer exists")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ChannelError(channel, f"cannot open {endpoint}: {error.strerror}") from error
        try:
            if _low(os.fstat(descriptor).st_ino) != _low(int(inode)):
                raise ChannelError(channel, f"{endpoint} no longer exists")
            opened = cls(descriptor, endpoint)
        except (OSError, ValueError) as error:
            raise ChannelError(channel, f"cannot map {endpoint}: {error}") from error
        finally:
            os.close(descriptor)  # the mapping keeps its own
        if opened.words[MAGIC] != magic:
            raise ChannelError(channel, f"{endpoint} is not a channel of this version of rayagi")
        return opened

    @classmethod
    def receive(cls, channel: str, descriptor: int, magic: int) -> Self:
        """Map a file whose descriptor another process has sent; takes the descriptor over, unless an OSError is raised.

        The file is opened once more, because a lock on a descriptor that was sent would be the sender's too.

        Raises:
            ChannelError: the file is of another kind.
            OSError: this process lacks descriptors or memory.
        """
        path = f"/proc/self/fd/{descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{FILE_PREFIX}"):
            os.close(descriptor)
            raise ChannelError(channel, "a process sent a file that is no channel")
        try:
            # A mapping keeps a copy of its descriptor, and with it a lock: so the one that locks is not mapped.
            received = cls(descriptor, path)
            received.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except ValueError as error:  # an empty file
            os.close(descriptor)
            raise ChannelError(channel, f"a process sent a file that is no channel: {error}") from error
        os.close(descriptor)
        _received.add(received)
        if received.words[MAGIC] != magic:
            raise ChannelError(channel, "a process sent a channel of another version of rayagi")
        return received

    def try_lock(self) -> bool:
        """Lock the file, if no other process has; until ``close``, or until this process ends however."""
        assert self.descriptor is not None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def page_lock(self) -> None:
        """Page-lock the mapping, so that CUDA copies from it directly, while this object exists [unverified on GPU].

        If the driver refuses, that is logged, and copies go through the driver's own buffer.
        """
        status = page_lock(self.address, len(self.bytes))
        self._is_page_locked = status == 0
        if not self._is_page_locked:
            _logger.warning(
                "a channel's memory is not page-locked (error %s): copies to the GPU are slower", status
            )

    def word_address(self, word: int) -> int:
        """Address of a word, for futex calls."""
        return self.address + word * WORD

    def close(self) -> None:
        """Close the descriptor: no process can open it here any more. The mapping stays until nothing refers to it.

        Safe to call twice.
        """
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        self.close()
        if self._is_page_locked and not sys.is_finalizing():  # the driver ends with the process
            unlock(self.address)


_received: WeakSet[SharedFile] = WeakSet()


def _after_fork_in_child() -> None:
    # A lock is held until every copy of its descriptor is closed: a child must not keep it beyond this process's end.
    for file in _received:
        file.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


def pid_of(endpoint: str) -> int:
    """Id of the process that created the file at an endpoint."""
    return int(endpoint.split("/")[2])


def word_of(endpoint: str) -> int:
    """An endpoint packed into one word, which is stored atomically: process, descriptor, lower bits of the inode."""
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
    """Decode the Arrow schema message that a channel's file contains."""
    return ExperienceSchema.from_arrow(pa.ipc.read_schema(pa.py_buffer(message)))
