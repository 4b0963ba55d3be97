"""Read-only inspection of the live channels on this host. Does not block producers or consumers.

Files are found by their name among the descriptors of this user's processes in /proc. Counters are read while they change:
numbers of one snapshot may differ by a batch.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from collectives.experience import file_layout
from collectives.experience.errors import ChannelError, NoChannelError
from collectives.experience.file_layout import FILE_PREFIX, RingLayout
from collectives.experience.messages import MessageLayouts
from collectives.experience.schema import ExperienceSchema
from collectives.shared_words import shared_words

_TRIES = 1000
"""Attempts to copy a batch that its producer overwrites meanwhile."""
_POLL_S = 0.01
"""Between two looks at a channel that holds no batch: a batch stays at least until its consumer has released it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerStats:
    """A consumer of one producer ring."""

    pid: int
    found: bool
    """Whether it has mapped the ring."""
    backlog: int
    """Batches that were posted to it and not released."""
    untaken: int
    """Those of the backlog that it has not taken."""
    lag: int
    """Version of the ring's newest batch, less that of the oldest batch that this consumer has not released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerRingStats:
    """Snapshot of a producer ring. Counters are since its creation."""

    schema: ExperienceSchema
    producer: int
    pid: int
    alive: bool
    """Whether its process is alive; if not, consumers still map the file."""
    inode: int
    rows: int
    slots: int
    in_use: int
    """Slots that are being filled, waiting, or posted and not released."""
    committed: int
    committed_rows: int
    committed_bytes: int
    reposted: int
    version: int
    """Of the newest batch."""
    blocked_s: float
    """Time for which the producer has waited for slots."""
    at_s: float
    """Monotonic time of the snapshot."""
    consumers: tuple[ConsumerStats, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDump:
    """Copy of a batch of a channel."""

    producer: int
    sequence: int
    version: int
    committed_ns: int
    """Time since the epoch."""
    batch: pa.RecordBatch
    """With ``rayagi.producer``, ``rayagi.sequence`` and ``rayagi.version`` in its schema's metadata."""


class ProducerRingFile:
    """Producer ring of another process, read-only."""

    def __init__(self, memory: mmap.mmap, inode: int, alive: bool) -> None:
        self._bytes = memoryview(memory)
        self._words = words = shared_words(self._bytes.cast("Q"))
        self._inode, self._alive = inode, alive
        self._shape = RingLayout.of(words)
        begin = self._shape.schema_at
        self.schema = file_layout.read_schema(self._bytes[begin : begin + self._shape.schema_bytes])
        self._layouts = MessageLayouts(self.schema)

    def stats(self) -> ProducerRingStats:
        """Take a snapshot."""
        words = self._words
        now_ns, since_ns = time.monotonic_ns(), words[file_layout.BLOCKED_SINCE_NS]
        waiting_ns = max(0, now_ns - since_ns) if since_ns and self._alive else 0
        states = [self._state(slot) for slot in range(self._shape.slots)]
        return ProducerRingStats(
            schema=self.schema,
            producer=words[file_layout.PRODUCER],
            pid=words[file_layout.PID],
            alive=self._alive,
            inode=self._inode,
            rows=words[file_layout.ROWS],
            slots=self._shape.slots,
            in_use=sum(state != file_layout.STATE_FREE for state in states),
            committed=words[file_layout.COMMITTED],
            committed_rows=words[file_layout.COMMITTED_ROWS],
            committed_bytes=words[file_layout.COMMITTED_BYTES],
            reposted=words[file_layout.REPOSTED],
            version=words[file_layout.NEWEST_VERSION],
            blocked_s=(words[file_layout.BLOCKED_NS] + waiting_ns) / 1e9,
            at_s=now_ns / 1e9,
            consumers=tuple(self._consumers(states)),
        )

    def newest(self) -> BatchDump | None:
        """A consistent copy of the newest batch; None if no slot holds one.

        Raises:
            ChannelError: slots are overwritten faster than this process copies.
        """
        for _ in range(_TRIES):
            ticket, slot = max(
                (self._header(slot)[file_layout.SLOT_TICKET], slot) for slot in range(self._shape.slots)
            )
            if not ticket:
                return None
            header = self._header(slot)
            message = self._message(slot, header[file_layout.SLOT_ROWS])
            # Seqlock: the copy is whole if the ticket is the same before and after it.
            if header[file_layout.SLOT_TICKET] == self._header(slot)[file_layout.SLOT_TICKET] == ticket:
                return self._dump(header, message)
        raise ChannelError(
            self.schema.name, f"its slots are overwritten faster than {_TRIES} copies could be made"
        )

    def _state(self, slot: int) -> int:
        """State that the producer wrote, or free if the consumer has released the slot since."""
        ticket, *_, state = self._header(slot)
        queue = state - file_layout.STATE_POSTED
        if (
            queue >= 0
            and self._words[self._shape.queue_word(queue) + self._shape.released_at + slot] == ticket
        ):
            return file_layout.STATE_FREE
        return state

    def _consumers(self, states: list[int]) -> Iterator[ConsumerStats]:
        words = self._words
        for queue in range(file_layout.MAX_CONSUMERS):
            begin = self._shape.queue_word(queue)
            consumer_file = words[begin + file_layout.QUEUE_OWNER]
            if not consumer_file:
                continue
            has = [slot for slot, state in enumerate(states) if state == file_layout.STATE_POSTED + queue]
            oldest = min(
                (self._header(slot)[file_layout.SLOT_VERSION] for slot in has),
                default=words[file_layout.NEWEST_VERSION],
            )
            yield ConsumerStats(
                pid=file_layout.pid_of(file_layout.endpoint_in(consumer_file)),
                found=bool(words[begin + file_layout.ATTACH_ACK]),
                backlog=len(has),
                untaken=max(0, words[begin + file_layout.TAIL] - words[begin + file_layout.HEAD]),
                lag=max(0, words[file_layout.NEWEST_VERSION] - oldest),
            )

    def _header(self, slot: int) -> list[int]:
        begin = self._shape.slot_word(slot)
        return [self._words[begin + word] for word in range(file_layout.SLOT_STATE + 1)]

    def _message(self, slot: int, rows: int) -> bytes:
        # The header may be half written: bound the number of rows.
        layout = self._layouts.for_rows(min(rows, self._words[file_layout.ROWS]))
        begin = self._shape.slot_word(slot) * file_layout.WORD + file_layout.SLOT_HEADER_BYTES + layout.lead
        return bytes(self._bytes[begin : begin + layout.size])

    def _dump(self, header: list[int], message: bytes) -> BatchDump:
        dump = BatchDump(
            producer=self._words[file_layout.PRODUCER],
            sequence=header[file_layout.SLOT_SEQUENCE],
            version=header[file_layout.SLOT_VERSION],
            committed_ns=header[file_layout.SLOT_TIME_NS],
            batch=self._layouts.read(memoryview(message)),
        )
        keys = {f"rayagi.{name}": str(getattr(dump, name)) for name in ("producer", "sequence", "version")}
        metadata = {**dump.batch.schema.metadata, **keys}
        return replace(dump, batch=dump.batch.replace_schema_metadata(metadata))


def list_producer_rings() -> list[ProducerRingFile]:
    """Producer rings of this user's processes on this host, sorted by channel and producer."""
    found: dict[int, ProducerRingFile] = {}
    for pid, path in _files():
        with suppress(OSError, ValueError):  # the file may be closed, or its process end, meanwhile
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                inode = os.fstat(descriptor).st_ino
                memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            words = shared_words(memoryview(memory).cast("Q"))
            mine = words[file_layout.PID] == pid
            if words[file_layout.MAGIC] == file_layout.RING_MAGIC and (mine or inode not in found):
                found[inode] = ProducerRingFile(memory, inode, alive=mine)
    return sorted(found.values(), key=_place)


def newest_batch(channel: str, timeout_s: float = 0.0) -> BatchDump:
    """The batch of a channel that was committed last, of any producer.

    While a producer fills its only slot, it holds no batch: then this waits for one, up to ``timeout_s`` seconds.

    Raises:
        NoChannelError: there is no such channel, or nothing in it.
    """
    until = time.monotonic() + timeout_s
    while (newest := _newest_of(channel)) is None:
        if time.monotonic() >= until:
            waited = f" and none did in {timeout_s:g} s" if timeout_s else ""
            raise NoChannelError(channel, f"no slot of it holds a batch now{waited}")
        time.sleep(_POLL_S)
    return newest


def _newest_of(channel: str) -> BatchDump | None:
    found = list_producer_rings()
    names = sorted({ring.schema.name for ring in found})
    if channel not in names:
        live = (
            f"live channels of yours are {', '.join(names)}"
            if names
            else "no channel of yours is live on this host"
        )
        raise NoChannelError(channel, f"there is none: {live}")
    dumps = [dump for ring in found if ring.schema.name == channel and (dump := ring.newest())]
    return max(dumps, key=lambda dump: dump.committed_ns, default=None)


def _place(ring: ProducerRingFile) -> Any:
    stats = ring.stats()
    return stats.schema.name, stats.producer, stats.pid, stats.inode


def _files() -> Iterator[tuple[int, str]]:
    """Process id and path of every open descriptor of a channel file."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            if os.stat(f"/proc/{process}").st_uid != os.getuid():
                continue
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                path = f"/proc/{process}/fd/{descriptor}"
                with suppress(OSError):
                    if os.readlink(path).startswith(f"/memfd:{FILE_PREFIX}"):
                        yield int(process), path
