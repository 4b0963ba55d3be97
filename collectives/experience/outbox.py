"""A producer's end of a channel: slots in shared memory that it fills in place and posts to consumers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from collectives import futex
from collectives.experience import memory as at
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.memory import OutboxShape, SharedFile
from collectives.experience.messages import Layouts
from collectives.experience.schema import ExperienceSchema
from collectives.processes import Processes

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


@dataclass(frozen=True, slots=True)
class Parcel:
    """A committed batch as bytes: what a way without shared memory carries."""

    sequence: int
    version: int
    rows: int
    message: memoryview
    """Arrow's, in the slot."""


class Claim:
    """A slot to be filled; nobody sees it before ``commit``."""

    __slots__ = ("_outbox", "num_rows", "slot", "tensors")

    def __init__(self, outbox: Outbox, slot: int, num_rows: int, tensors: dict[str, Tensor]) -> None:
        self._outbox, self.slot, self.num_rows, self.tensors = outbox, slot, num_rows, tensors

    def __getitem__(self, name: str) -> Tensor:
        """A field's rows, (num_rows, *shape), in the slot: what was there before is still there."""
        return self.tensors[name]

    @property
    def message(self) -> memoryview:
        """All bytes of its Arrow message, to be filled with those of another of as many rows."""
        return self._outbox.message(self.slot, self.num_rows)

    def commit(self, version: int, to: int | None = None, sequence: int | None = None) -> int:
        """Post it: to a consumer's line, or to the one with the least backlog. Returns its sequence number, from 1.

        Without a consumer that may have one more, it waits in the outbox for the next call of any method. Who passes on
        batches of another outbox gives the number that they had there.
        """
        return self._outbox.commit(self, version, to, sequence)

    def cancel(self) -> None:
        """Give the slot back unseen."""
        self._outbox.cancel(self)


class Outbox:
    """One producer's slots. Not for several threads at once.

    ::

        outbox = Outbox(schema, rows=64, slots=4, producer=0)
        outbox.attach(endpoint_of_an_inbox)
        claim = outbox.claim(64, timeout_s=10.0)
        claim["obs"].copy_(obs)
        claim.commit(version=3)
    """

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
        if (
            rows < 1
            or slots < 1
            or not 0 <= producer < at.MAX_PRODUCERS
            or (credit is not None and credit < 1)
        ):
            raise ValueError(
                f"rows={rows}, slots={slots}, credit={credit} must be at least 1, and producer={producer} less than "
                f"{at.MAX_PRODUCERS}"
            )
        self.schema, self.rows, self.producer = schema, rows, producer
        self._layouts = Layouts(schema)
        self._credit, self._routed = credit or slots, routed
        message = self._layouts.schema_message()
        self._shape = OutboxShape(
            slots=slots,
            slot_stride=at.slot_stride(self._layouts.of(rows).size),
            schema_bytes=len(message),
        )
        self._file = SharedFile.create(schema.name, self._shape.size)
        self._words = words = self._file.words
        self._file.bytes[self._shape.schema_at : self._shape.schema_at + len(message)] = message
        for word, value in (
            (at.PID, at.pid_of(self._file.endpoint)),
            (at.PRODUCER, producer),
            (at.ROWS, rows),
            (at.SLOTS, slots),
            (at.STRIDE, self._shape.slot_stride),
            (at.SLOTS_AT, self._shape.slots_at),
            (at.SCHEMA_BYTES, len(message)),
            (at.ORIGIN, origin),
            (at.MAGIC, at.OUTBOX_MAGIC),
        ):
            words[word] = value
        self._free = deque(range(slots))
        self._posted: dict[int, dict[int, int]] = {}
        """By consumer's line: sequence number of each slot that was posted to it and not seen released."""
        self._waiting: deque[int] = deque()
        """Committed slots that no consumer could take yet, in order."""
        self._inboxes: dict[int, SharedFile] = {}
        self._processes = Processes()
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._metadata_rows = [-1] * slots
        self._sequence = self._rings = 0
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Where its file is."""
        return self._file.endpoint

    def attach(self, inbox_endpoint: str) -> int:
        """Connect to a consumer. Returns its line; the same for one that is attached already.

        Raises:
            ChannelError: there is no such inbox any more, or no line is free.
            SchemaError: it expects something else.
        """
        self._check_open()
        for line in self._inboxes:
            if self.takes(line, inbox_endpoint):
                return line
        inbox = SharedFile.open(self.schema.name, inbox_endpoint, at.INBOX_MAGIC)
        inbox.endpoint = inbox_endpoint
        size, begin = inbox.words[at.INBOX_SCHEMA_BYTES], (at.KNOCKS_AT + at.MAX_PRODUCERS) * at.WORD
        theirs = at.read_schema(inbox.bytes[begin : begin + size])
        self.schema.refuse_other(theirs, f"the consumer of process {at.pid_of(inbox_endpoint)}")
        free = [line for line in range(at.MAX_CONSUMERS) if line not in self._inboxes]
        if not free:
            raise ChannelError(self.schema.name, f"{at.MAX_CONSUMERS} consumers are attached already")
        line, pid = free[0], at.pid_of(inbox_endpoint)
        begin_word = self._shape.line(line)
        for word in range(begin_word, begin_word + self._shape.line_words):
            self._words[word] = 0
        self._words[begin_word + at.INBOX_FILE] = at.descriptor_of(inbox_endpoint)
        self._words[begin_word + at.CONSUMER_PID] = pid
        self._inboxes[line], self._posted[line] = inbox, {}
        self._processes.watch(pid)
        inbox.words[at.KNOCKS_AT + self.producer] = at.pid_and_file(self._file.endpoint)
        self._ring(line)
        self._pump()
        return line

    def consumers(self) -> tuple[ConsumerState, ...]:
        """Those that are attached and alive."""
        self._pump()
        return tuple(
            ConsumerState(line, self._words[self._shape.line(line) + at.CONSUMER_PID], len(posted))
            for line, posted in self._posted.items()
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
        if not self._free:
            self._wait_until(lambda: bool(self._free), timeout_s)
        slot = self._free.popleft()
        return Claim(self, slot, count, self._views(slot, count))

    def put(
        self, rows: Mapping[str, Tensor], version: int, timeout_s: float = 60.0, to: int | None = None
    ) -> int:
        """Claim, copy, commit. Returns the sequence number.

        Raises:
            SchemaError: other fields, types or shapes than the channel's.
            ChannelTimeoutError: no consumer released a slot within the time limit.
        """
        claim = self.claim(self.schema.refuse_tensors(rows), timeout_s)
        for name, tensor in rows.items():
            claim.tensors[name].copy_(tensor)
        return claim.commit(version, to)

    def commit(self, claim: Claim, version: int, to: int | None, sequence: int | None = None) -> int:
        """See ``Claim.commit``."""
        self._check_open()
        self._sequence = self._sequence + 1 if sequence is None else sequence
        words, header = self._words, self._slot_word(claim.slot)
        words[header + at.SLOT_SEQUENCE] = self._sequence
        words[header + at.SLOT_VERSION] = version
        words[header + at.SLOT_ROWS] = claim.num_rows
        words[header + at.SLOT_TIME_NS] = time.time_ns()
        words[at.SEQUENCE] = self._sequence
        words[at.POSTED_ROWS] += claim.num_rows
        words[at.POSTED_BYTES] += claim.num_rows * self.schema.row_bytes
        words[at.POSTED] += 1
        if to in self._inboxes and not self._waiting and not self._inboxes[to].words[at.INBOX_CLOSED]:
            self._post(claim.slot, to)
        else:
            self._waiting.append(claim.slot)
            self._pump()
        return self._sequence

    def cancel(self, claim: Claim) -> None:
        """See ``Claim.cancel``."""
        self._free.append(claim.slot)

    def message(self, slot: int, rows: int) -> memoryview:
        """The bytes of the Arrow message in a slot."""
        begin = self._slot_byte(slot) + at.SLOT_HEADER_BYTES
        return self._file.bytes[begin : begin + self._layouts.of(rows).size]

    def look(self) -> None:
        """Take in what was released and who is gone, as every other call does first."""
        self._check_open()
        self._pump()

    def takes(self, line: int, inbox_endpoint: str) -> bool:
        """Whether this consumer is attached there, alive as far as was seen, and open."""
        inbox = self._inboxes.get(line)
        return inbox is not None and inbox.endpoint == inbox_endpoint and not inbox.words[at.INBOX_CLOSED]

    def backlog(self, line: int) -> int:
        """Batches that were posted there and not released."""
        return len(self._posted.get(line, ()))

    def waiting(self) -> list[int]:
        """Sequence numbers of committed batches that no consumer has, in the order in which they are to go."""
        return [self._sequence_of(slot) for slot in self._waiting]

    def unreleased(self) -> set[int]:
        """Sequence numbers of all committed batches that are not known to be released."""
        return {sequence for posted in self._posted.values() for sequence in posted.values()} | {
            *self.waiting()
        }

    def post(self, sequence: int, line: int) -> None:
        """Give a waiting batch to a consumer."""
        self._post(self._unqueue(sequence), line)

    def drop(self, sequence: int) -> None:
        """Free the slot of a waiting batch: it came there by another way, or is not wanted any more."""
        self._free.append(self._unqueue(sequence))

    def parcel(self, sequence: int) -> Parcel:
        """A waiting batch as bytes; valid until it is dropped."""
        slot = next(slot for slot in self._waiting if self._sequence_of(slot) == sequence)
        header = self._slot_word(slot)
        version, rows = self._words[header + at.SLOT_VERSION], self._words[header + at.SLOT_ROWS]
        return Parcel(sequence, version, rows, self.message(slot, rows))

    def drain(self, timeout_s: float) -> int:
        """Wait until consumers have released everything; returns how many batches they have not when time is up."""
        with suppress(ChannelTimeoutError):
            self._wait_until(lambda: not self._waiting and not any(self._posted.values()), timeout_s)
        return len(self._waiting) + sum(map(len, self._posted.values()))

    def close(self, timeout_s: float = 1.0) -> None:
        """Say goodbye. What was posted can still be read by consumers that have found this outbox: waits for these.

        Safe to call twice.
        """
        if self._closed:
            return
        with suppress(ChannelTimeoutError):
            self._wait_until(lambda: not self._waiting and all(map(self._is_found, self._posted)), timeout_s)
        self._closed = True
        self._words[at.CLOSED] = 1
        for line in self._inboxes:
            self._ring(line)
        self._processes.close()
        self._file.close()

    def _pump(self) -> None:
        """Take in what was released and who is gone, and post what waits."""
        words = self._words
        ended = self._processes.ended()
        for line in list(self._inboxes):
            if words[self._shape.line(line) + at.CONSUMER_PID] in ended:
                self._take_back(line, self._posted[line])
                self._forget(line)
            elif self._inboxes[line].words[at.INBOX_CLOSED]:
                self._take_back(line, self._untaken(line))
                if not self._posted[line]:
                    self._forget(line)
        for line in self._posted:
            self._take_in(line)
        while self._waiting and not self._routed:
            open_lines = [line for line, inbox in self._inboxes.items() if not inbox.words[at.INBOX_CLOSED]]
            line = min(open_lines, key=lambda line: len(self._posted[line]), default=-1)
            if line < 0 or len(self._posted[line]) >= self._credit:
                return
            self._post(self._waiting.popleft(), line)

    def _take_in(self, line: int) -> None:
        """Slots that a consumer has released are free."""
        posted, released = self._posted[line], self._shape.line(line) + self._shape.released_at
        for slot, sequence in list(posted.items()):
            if self._words[released + slot] == sequence:
                del posted[slot]
                self._free.append(slot)

    def _take_back(self, line: int, slots: Iterable[int]) -> None:
        """What a consumer that is gone will never release is posted again, before what waits already."""
        self._take_in(line)
        posted = self._posted[line]
        again = sorted((posted.pop(slot), slot) for slot in list(slots) if slot in posted)
        self._waiting.extendleft(slot for _, slot in reversed(again))
        self._words[at.REPOSTED] += len(again)

    def _untaken(self, line: int) -> list[int]:
        """Slots that a consumer which takes no more had not taken."""
        begin, words = self._shape.line(line), self._words
        places = range(words[begin + at.HEAD], words[begin + at.TAIL])
        return [words[begin + at.QUEUE_AT + place % self._shape.slots] for place in places]

    def _forget(self, line: int) -> None:
        begin = self._shape.line(line)
        self._processes.forget(self._words[begin + at.CONSUMER_PID])
        self._words[begin + at.CONSUMER_PID] = 0
        del self._inboxes[line], self._posted[line]

    def _post(self, slot: int, line: int) -> None:
        words, begin = self._words, self._shape.line(line)
        tail = words[begin + at.TAIL]
        words[begin + at.QUEUE_AT + tail % self._shape.slots] = slot
        words[begin + at.TAIL] = tail + 1  # after the slot and the entry: x86-64 shows stores in this order
        self._posted[line][slot] = words[self._slot_word(slot) + at.SLOT_SEQUENCE]
        self._ring(line)

    def _unqueue(self, sequence: int) -> int:
        slot = next(slot for slot in self._waiting if self._sequence_of(slot) == sequence)
        self._waiting.remove(slot)
        return slot

    def _sequence_of(self, slot: int) -> int:
        return self._words[self._slot_word(slot) + at.SLOT_SEQUENCE]

    def _ring(self, line: int) -> None:
        self._rings += 1
        inbox = self._inboxes[line]
        inbox.words[at.BELL] = self.producer << 24 | self._rings & 0xFFFFFF
        futex.wake(inbox.word_address(at.BELL))

    def _wait_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        begin = time.monotonic()
        while True:
            seen = self._words[at.FREED]
            self._pump()
            if done():
                break
            if time.monotonic() - begin >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._who_is_slow(), time.monotonic() - begin)
            futex.sleep(self._file.word_address(at.FREED), seen, _SLEEP_S)
        self._words[at.BLOCKED_NS] += int(1e9 * (time.monotonic() - begin))

    def _who_is_slow(self) -> str:
        states = [f"process {state.pid} holds {state.backlog}" for state in self.consumers()]
        held = "; ".join(states) or "no consumer is attached"
        waiting = f"; {len(self._waiting)} wait for one" if self._waiting else ""
        return f"all {self._shape.slots} slots of producer {self.producer} are in use: {held}{waiting}"

    def _is_found(self, line: int) -> bool:
        return bool(self._words[self._shape.line(line) + at.ATTACHED])

    def _views(self, slot: int, rows: int) -> dict[str, Tensor]:
        layout, begin = self._layouts.of(rows), self._slot_byte(slot) + at.SLOT_HEADER_BYTES
        if self._metadata_rows[slot] != rows:
            self._file.bytes[begin : begin + len(layout.metadata)] = layout.metadata
            self._metadata_rows[slot] = rows
        if rows != self.rows:
            return layout.tensors(self._file.bytes, begin)
        if slot not in self._tensors:
            self._tensors[slot] = layout.tensors(self._file.bytes, begin)
        return self._tensors[slot]

    def _slot_byte(self, slot: int) -> int:
        return self._shape.slots_at + slot * self._shape.slot_stride

    def _slot_word(self, slot: int) -> int:
        return self._slot_byte(slot) // at.WORD

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, f"the outbox of producer {self.producer} is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
