"""Looking at live channels of this host from outside: nothing is written, and nobody is held up.

Files are found by their name among the descriptors of this user's processes in /proc. What is counted is read while it is
written: numbers of one look may differ by a batch from each other.
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

from collectives.experience import memory as at
from collectives.experience.errors import ChannelError, NoChannelError
from collectives.experience.memory import FILE_PREFIX, OutboxShape
from collectives.experience.messages import Layouts
from collectives.experience.schema import ExperienceSchema
from collectives.shared_words import shared_words

_TRIES = 1000
"""Copies of a batch that its producer overwrote meanwhile, until we give up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerLook:
    """A consumer of one outbox."""

    pid: int
    found: bool
    """Whether it has mapped the outbox."""
    backlog: int
    """Batches that were posted to it and not released."""
    untaken: int
    """Of these, those that it has not taken."""
    lag: int
    """Versions between the newest batch of the outbox and the oldest that this consumer has not released."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutboxLook:
    """An outbox at one time. Counts are since its beginning."""

    schema: ExperienceSchema
    producer: int
    pid: int
    alive: bool
    """Whether its process is; else consumers keep the file."""
    inode: int
    rows: int
    slots: int
    in_use: int
    """Slots that are being filled, wait, or are posted and not released."""
    committed: int
    committed_rows: int
    committed_bytes: int
    reposted: int
    version: int
    """Of the newest batch."""
    blocked_s: float
    """How long the producer has waited for slots."""
    at_s: float
    """When this was, on the monotonic clock."""
    consumers: tuple[ConsumerLook, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """A batch that was copied out of a channel."""

    producer: int
    sequence: int
    version: int
    committed_ns: int
    """Time since the epoch."""
    batch: pa.RecordBatch
    """With ``rayagi.producer``, ``rayagi.sequence`` and ``rayagi.version`` in its schema's metadata."""


class OutboxFile:
    """Another process's outbox, read-only."""

    def __init__(self, memory: mmap.mmap, inode: int, alive: bool) -> None:
        self._bytes = memoryview(memory)
        self._words = words = shared_words(self._bytes.cast("Q"))
        self._inode, self._alive = inode, alive
        self._shape = OutboxShape(
            slots=words[at.SLOTS], slot_stride=words[at.STRIDE], schema_bytes=words[at.SCHEMA_BYTES]
        )
        begin = self._shape.schema_at
        self.schema = at.read_schema(self._bytes[begin : begin + self._shape.schema_bytes])
        self._layouts = Layouts(self.schema)

    def look(self) -> OutboxLook:
        """Where everything is now."""
        words = self._words
        now_ns, since_ns = time.monotonic_ns(), words[at.BLOCKED_SINCE_NS]
        waiting_ns = max(0, now_ns - since_ns) if since_ns and self._alive else 0
        states = [self._state(slot) for slot in range(self._shape.slots)]
        return OutboxLook(
            schema=self.schema,
            producer=words[at.PRODUCER],
            pid=words[at.PID],
            alive=self._alive,
            inode=self._inode,
            rows=words[at.ROWS],
            slots=self._shape.slots,
            in_use=sum(state != at.STATE_FREE for state in states),
            committed=words[at.COMMITTED],
            committed_rows=words[at.COMMITTED_ROWS],
            committed_bytes=words[at.COMMITTED_BYTES],
            reposted=words[at.REPOSTED],
            version=words[at.NEWEST_VERSION],
            blocked_s=(words[at.BLOCKED_NS] + waiting_ns) / 1e9,
            at_s=now_ns / 1e9,
            consumers=tuple(self._consumers(states)),
        )

    def newest(self) -> Dump | None:
        """A copy of the newest batch that no producer wrote to meanwhile; None where no slot holds one.

        Raises:
            ChannelError: slots are filled again faster than this process copies.
        """
        for _ in range(_TRIES):
            ticket, slot = max(
                (self._header(slot)[at.SLOT_TICKET], slot) for slot in range(self._shape.slots)
            )
            if not ticket:
                return None
            header = self._header(slot)
            message = self._message(slot, header[at.SLOT_ROWS])
            if header[at.SLOT_TICKET] == self._header(slot)[at.SLOT_TICKET] == ticket:
                return self._dump(header, message)
        raise ChannelError(
            self.schema.name, f"its slots are filled again faster than {_TRIES} copies could be made"
        )

    def _state(self, slot: int) -> int:
        """As its producer says, but for what was released since it last looked."""
        ticket, *_, state = self._header(slot)
        line = state - at.STATE_POSTED
        if line >= 0 and self._words[self._shape.line(line) + self._shape.released_at + slot] == ticket:
            return at.STATE_FREE
        return state

    def _consumers(self, states: list[int]) -> Iterator[ConsumerLook]:
        words = self._words
        for line in range(at.MAX_CONSUMERS):
            begin = self._shape.line(line)
            inbox = words[begin + at.CONSUMER_INBOX]
            if not inbox:
                continue
            has = [slot for slot, state in enumerate(states) if state == at.STATE_POSTED + line]
            oldest = min(
                (self._header(slot)[at.SLOT_VERSION] for slot in has), default=words[at.NEWEST_VERSION]
            )
            yield ConsumerLook(
                pid=at.pid_of(at.endpoint_in(inbox)),
                found=bool(words[begin + at.FOUND]),
                backlog=len(has),
                untaken=max(0, words[begin + at.TAIL] - words[begin + at.HEAD]),
                lag=max(0, words[at.NEWEST_VERSION] - oldest),
            )

    def _header(self, slot: int) -> list[int]:
        begin = self._shape.slot_word(slot)
        return [self._words[begin + word] for word in range(at.SLOT_STATE + 1)]

    def _message(self, slot: int, rows: int) -> bytes:
        layout = self._layouts.of(min(rows, self._words[at.ROWS]))  # a header may be half written
        begin = self._shape.slot_word(slot) * at.WORD + at.SLOT_HEADER_BYTES + layout.lead
        return bytes(self._bytes[begin : begin + layout.size])

    def _dump(self, header: list[int], message: bytes) -> Dump:
        dump = Dump(
            producer=self._words[at.PRODUCER],
            sequence=header[at.SLOT_SEQUENCE],
            version=header[at.SLOT_VERSION],
            committed_ns=header[at.SLOT_TIME_NS],
            batch=self._layouts.read(memoryview(message)),
        )
        said = {f"rayagi.{name}": str(getattr(dump, name)) for name in ("producer", "sequence", "version")}
        metadata = {**dump.batch.schema.metadata, **said}
        return replace(dump, batch=dump.batch.replace_schema_metadata(metadata))


def outboxes() -> list[OutboxFile]:
    """Those of this user's processes on this host, by channel and producer."""
    found: dict[int, OutboxFile] = {}
    for pid, path in _files():
        with suppress(OSError, ValueError):  # it may be closed, or its process end, while we look
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                inode = os.fstat(descriptor).st_ino
                memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            words = shared_words(memoryview(memory).cast("Q"))
            mine = words[at.PID] == pid
            if words[at.MAGIC] == at.OUTBOX_MAGIC and (mine or inode not in found):
                found[inode] = OutboxFile(memory, inode, alive=mine)
    return sorted(found.values(), key=_place)


def newest_of(channel: str) -> Dump:
    """The batch of a channel that was committed last, of any producer.

    Raises:
        NoChannelError: there is no such channel, or nothing in it.
    """
    found = outboxes()
    names = sorted({outbox.schema.name for outbox in found})
    if channel not in names:
        live = (
            f"live channels of yours are {', '.join(names)}"
            if names
            else "no channel of yours is live on this host"
        )
        raise NoChannelError(channel, f"there is none: {live}")
    dumps = [dump for outbox in found if outbox.schema.name == channel and (dump := outbox.newest())]
    if not dumps:
        raise NoChannelError(channel, "no slot of it holds a batch now")
    return max(dumps, key=lambda dump: dump.committed_ns)


def _place(outbox: OutboxFile) -> Any:
    look = outbox.look()
    return look.schema.name, look.producer, look.pid, look.inode


def _files() -> Iterator[tuple[int, str]]:
    """Process and path of every descriptor of a channel."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            if os.stat(f"/proc/{process}").st_uid != os.getuid():
                continue
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                path = f"/proc/{process}/fd/{descriptor}"
                with suppress(OSError):
                    if os.readlink(path).startswith(f"/memfd:{FILE_PREFIX}"):
                        yield int(process), path
