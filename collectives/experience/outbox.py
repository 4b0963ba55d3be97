"""A producer's end of a channel: slots in shared memory that it fills in place and posts to consumers."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from collectives import futex
from collectives.experience import memory as at
from collectives.experience.claim import Claim, Parcel
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.line import Line, open_inbox
from collectives.experience.memory import OutboxShape, SharedFile
from collectives.experience.messages import Layouts
from collectives.experience.schema import ExperienceSchema
from collectives.experience.slots import Slots
from collectives.processes import Processes

_logger = logging.getLogger(__name__)

_SLEEP_S = 0.05
"""After which a producer that waits looks whether its consumers are alive."""


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """A consumer as its producer sees it."""

    line: int
    """Its place in this outbox: what ``commit(to=)`` takes."""
    pid: int
    backlog: int
    """Batches that were posted to it and not released."""
    found: bool
    """Whether it has mapped this outbox. From then on it reads what was posted to it even if this process ends."""


class Outbox:
    """One producer's slots. Not for several threads at once.

    ::

        outbox = Outbox(schema, rows=64, slots=4, producer=0)
        outbox.attach(endpoint_of_an_inbox)
        claim = outbox.claim(64, timeout_s=10.0)
        claim["obs"].copy_(obs)
        claim.commit(version=3)
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
    ) -> None:
        """Give it its memory.

        Args:
            schema: what the channel carries
            rows: that a batch has at most
            slots: batches that can be under way: being filled, posted, or being read
            producer: its number in the channel, from 0
            credit: batches that one consumer may have and not have released; None: all slots
            origin: tells this producer from another that had its number before; the same in all its outboxes
            routed: the owner says where each batch goes (``waiting``, ``post``, ``drop``), not this outbox

        Raises:
            ChannelError: there is no memory for it.
            ValueError: a number is out of its range.
        """
        if min(rows, slots, slots if credit is None else credit) < 1 or not 0 <= producer < at.MAX_PRODUCERS:
            raise ValueError(
                f"rows={rows}, slots={slots}, credit={credit} must be at least 1, and producer={producer} from 0 to "
                f"{at.MAX_PRODUCERS - 1}"
            )
        self.schema, self.rows, self.slots, self.producer = schema, rows, slots, producer
        self._credit, self._routed = credit or slots, routed
        self._row_bytes = schema.row_bytes
        self._layouts = Layouts(schema)
        message = self._layouts.schema_message()
        self._shape = shape = OutboxShape(
            slots=slots,
            slot_stride=at.slot_stride(self._layouts.of(rows).size),
            schema_bytes=len(message),
        )
        self._file = SharedFile.create(schema.name, shape.size)
        self._words = words = self._file.words
        self._file.bytes[shape.schema_at : shape.schema_at + len(message)] = message
        for word, value in (
            (at.PID, at.pid_of(self._file.endpoint)),
            (at.PRODUCER, producer),
            (at.ORIGIN, origin),
            (at.ROWS, rows),
            (at.SLOTS, slots),
            (at.STRIDE, shape.slot_stride),
            (at.SCHEMA_BYTES, len(message)),
            (at.MAGIC, at.OUTBOX_MAGIC),
        ):
            words[word] = value
        self._slots = Slots(self._file, shape, self._layouts, rows)
        self._waiting: list[int] = []
        """Committed slots that no consumer has, by ticket."""
        self._lines: dict[int, Line] = {}
        self._processes = Processes()
        self._sequence = 0
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Where its file is."""
        return self._file.endpoint

    def attach(self, inbox_endpoint: str) -> int:
        """Connect to a consumer. Returns its line; the same for one that is attached already.

        Raises:
            ChannelError: there is no such inbox any more, it has another producer of this number, or no line is free.
            SchemaError: it expects something else.
        """
        self._check_open()
        self._pump()
        for number in self._lines:
            if self.takes(number, inbox_endpoint):
                return number
        inbox = open_inbox(self.schema, inbox_endpoint, self.producer, self.endpoint)
        free = [number for number in range(at.MAX_CONSUMERS) if number not in self._lines]
        if not free:
            raise ChannelError(self.schema.name, f"{at.MAX_CONSUMERS} consumers are attached already")
        self._lines[free[0]] = line = Line(self._file, self._shape, free[0], inbox)
        self._processes.watch(line.pid)
        line.knock(self.endpoint)
        self._pump()
        return free[0]

    def consumers(self) -> tuple[ConsumerState, ...]:
        """Those that are attached and alive."""
        self._pump()
        return tuple(
            ConsumerState(number, line.pid, len(line.posted), line.is_found)
            for number, line in self._lines.items()
        )

    def claim(self, rows: int | None = None, timeout_s: float = 60.0) -> Claim:
        """Wait for a free slot for a batch of ``rows`` rows (None: as many as it holds).

        Raises:
            SchemaError: a slot does not hold as many.
            ChannelTimeoutError: no consumer released one within the time limit.
        """
        count = self.rows if rows is None else rows
        if not 0 <= count <= self.rows:
            raise SchemaError(
                self.schema.name,
                f"a batch of {count} rows: this ring's slots hold {self.rows}; make it with rows={count}",
            )
        self._check_open()
        self._pump()
        if not self._slots.free:
            self._wait_for_slot(timeout_s)
        slot, tensors = self._slots.begin(count)
        return Claim(self, slot, count, tensors)

    def put(
        self, rows: Mapping[str, Tensor], version: int, timeout_s: float = 60.0, to: int | None = None
    ) -> int:
        """Claim, copy, commit. Returns the sequence number.

        Raises:
            SchemaError: other fields, types or shapes than the channel's.
            ChannelTimeoutError: no consumer released a slot within the time limit.
        """
        claim = self.claim(self.schema.refuse_tensors(rows), timeout_s)
        try:
            with torch.no_grad():  # the slot's tensors outlive any graph
                for name, tensor in rows.items():
                    claim.tensors[name].copy_(tensor)
            return claim.commit(version, to)
        finally:
            claim.cancel()

    def commit(self, claim: Claim, version: int, to: int | None, sequence: int | None) -> int:
        """See ``Claim.commit``."""
        self._check_open()
        if not claim.is_open:
            raise ChannelError(self.schema.name, "this batch was committed or cancelled before")
        number = self._sequence + 1 if sequence is None else sequence
        if version < 0 or number < 0:
            raise ValueError(f"version={version} and sequence={number} must not be negative")
        self._sequence = number
        words = self._words
        ticket = words[at.COMMITTED] + 1
        self._slots.commit(claim.slot, ticket, number, version, claim.num_rows)
        words[at.COMMITTED] = ticket
        words[at.COMMITTED_ROWS] += claim.num_rows
        words[at.COMMITTED_BYTES] += claim.num_rows * self._row_bytes
        words[at.NEWEST_VERSION] = version
        if to is not None and self._is_open(to):
            self._post(claim.slot, to)
        else:
            self._queue([claim.slot])
            self._post_waiting()
        return number

    def cancel(self, claim: Claim) -> None:
        """See ``Claim.cancel``."""
        self._slots.set_free([claim.slot])

    def message(self, slot: int, rows: int) -> memoryview:
        """The bytes of the Arrow message in a slot."""
        return self._slots.message(slot, rows)

    def look(self) -> None:
        """Take in what was released and who is gone, as every other call does first."""
        self._check_open()
        self._pump()

    def takes(self, line: int, inbox_endpoint: str) -> bool:
        """Whether this consumer is attached there, alive as far as was seen, and open."""
        return self._is_open(line) and self._lines[line].endpoint == inbox_endpoint

    def backlog(self, line: int) -> int:
        """Batches that were posted there and not seen released."""
        return len(self._lines[line].posted) if line in self._lines else 0

    def waiting(self) -> list[int]:
        """Sequence numbers of committed batches that no consumer has, in the order in which they are to go."""
        return [self._slots.sequence(slot) for slot in self._waiting]

    def unreleased(self) -> set[int]:
        """Sequence numbers of all committed batches that are not known to be released."""
        posted = {self._slots.sequence(slot) for line in self._lines.values() for slot in line.posted}
        return posted | {*self.waiting()}

    def post(self, sequence: int, line: int) -> None:
        """Give a waiting batch to a consumer."""
        self._post(self._unqueue(sequence), line)

    def drop(self, sequence: int) -> None:
        """Free the slot of a waiting batch: it came there by another way, or is not wanted any more."""
        self._slots.set_free([self._unqueue(sequence)])

    def parcel(self, sequence: int) -> Parcel:
        """A waiting batch as bytes; valid until it is dropped."""
        return self._slots.parcel(self._waiting_slot(sequence))

    def drain(self, timeout_s: float) -> int:
        """Wait until consumers have released everything; returns how many batches they have not when time is up."""
        self._check_open()
        with suppress(ChannelTimeoutError):
            self._wait_until(lambda: not self._unreleased_count(), timeout_s)
        return self._unreleased_count()

    def close(self, timeout_s: float = 1.0) -> None:
        """Say goodbye. Safe to call twice.

        Consumers still read what was posted to them, if they have found this outbox: this waits until they have. But what a
        consumer does not release before its own end is not posted again from here on: ``drain`` before, where that matters.
        """
        if self._closed:
            return
        lines = self._lines.values()
        with suppress(ChannelTimeoutError):
            self._wait_until(lambda: not self._waiting and all(line.is_found for line in lines), timeout_s)
        lost = len(self._waiting) + sum(len(line.posted) for line in lines if not line.is_found)
        if lost:
            _logger.warning(
                "channel %r: producer %d closes with %d batches that no consumer has come for",
                self.schema.name,
                self.producer,
                lost,
            )
        self._closed = True
        self._words[at.CLOSED] = 1
        for line in lines:
            line.ring()
        self._lines = {}
        self._processes.close()
        self._file.close()

    def _pump(self) -> None:
        """Take in what was released and who is gone, and post what waits."""
        ended = self._processes.ended()  # asked before looking at what they released: they do not any more
        for number, line in list(self._lines.items()):
            is_closed = line.is_closed
            self._slots.set_free(line.take_in())
            if line.pid in ended:
                self._take_back(line, list(line.posted))
            elif is_closed:
                self._take_back(line, line.untaken())
            if line.pid in ended or (is_closed and not line.posted):
                line.give_up()
                del self._lines[number]
                self._processes.watch_only(line.pid for line in self._lines.values())
        self._post_waiting()

    def _post_waiting(self) -> None:
        """What waits goes to whoever has least, up to its credit."""
        while self._waiting and not self._routed:
            open_lines = [number for number in self._lines if self._is_open(number)]
            number = min(open_lines, key=self.backlog, default=-1)
            if number < 0 or self.backlog(number) >= self._credit:
                return
            self._post(self._waiting.pop(0), number)

    def _take_back(self, line: Line, slots: list[int]) -> None:
        """What a consumer that is gone will never release is posted again, before what is younger."""
        for slot in slots:
            del line.posted[slot]
        self._queue(slots)
        self._words[at.REPOSTED] += len(slots)

    def _queue(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.set_state(slot, at.STATE_WAITING)
        self._waiting = sorted([*self._waiting, *slots], key=self._slots.ticket)

    def _unqueue(self, sequence: int) -> int:
        slot = self._waiting_slot(sequence)
        self._waiting.remove(slot)
        return slot

    def _waiting_slot(self, sequence: int) -> int:
        return next(slot for slot in self._waiting if self._slots.sequence(slot) == sequence)

    def _post(self, slot: int, line: int) -> None:
        self._lines[line].post(slot, self._slots.ticket(slot))
        self._slots.set_state(slot, at.STATE_POSTED + line)

    def _wait_for_slot(self, timeout_s: float) -> None:
        begin_ns = self._words[at.BLOCKED_SINCE_NS] = time.monotonic_ns()
        try:
            self._wait_until(lambda: bool(self._slots.free), timeout_s)
        finally:
            self._words[at.BLOCKED_NS] += time.monotonic_ns() - begin_ns
            self._words[at.BLOCKED_SINCE_NS] = 0

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        begin = time.monotonic()
        while True:
            seen = self._words[at.FREED]
            self._pump()
            if done():
                return
            waited_s = time.monotonic() - begin
            if waited_s >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._who_is_slow(), waited_s)
            futex.sleep(self._file.word_address(at.FREED), seen, min(_SLEEP_S, timeout_s - waited_s))

    def _who_is_slow(self) -> str:
        states = [f"process {line.pid} holds {len(line.posted)}" for line in self._lines.values()]
        filled = self.slots - len(self._slots.free) - self._unreleased_count()
        states += [f"{len(self._waiting)} wait for a consumer"] if self._waiting else []
        states += [f"{filled} are being filled"] if filled else []
        attached = "" if self._lines else "no consumer is attached; "
        return f"of {self.slots} slots of producer {self.producer}, {attached}{', '.join(states)}"

    def _unreleased_count(self) -> int:
        return len(self._waiting) + sum(len(line.posted) for line in self._lines.values())

    def _is_open(self, line: int) -> bool:
        return line in self._lines and not self._lines[line].is_closed

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, f"the outbox of producer {self.producer} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the process ends, which consumers notice as such
            self.close(timeout_s=0.0)
