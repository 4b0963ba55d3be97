"""A consumer's end of a channel: takes batches from every producer that knocked, as views of their memory."""

from __future__ import annotations

import logging
import os
import sys
import time
from types import TracebackType
from typing import Self

from collectives import futex
from collectives.experience import memory as at
from collectives.experience.batch import Batch, Link
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.memory import SharedFile
from collectives.experience.messages import Layouts
from collectives.experience.schema import ExperienceSchema
from collectives.processes import Processes

_logger = logging.getLogger(__name__)

_OFFER_S = 200e-6
"""How long the processor is offered to others before sleeping: the producer may have just begun to post."""
_SLEEP_S = 0.05
"""How often a consumer looks whether its producers are alive."""


class Inbox:
    """One consumer's end. Not for several threads at once; batches may be released by any.

    ::

        inbox = Inbox(schema)              # tell producers inbox.endpoint
        with inbox.take(timeout_s=10.0) as batch:
            learn(batch["obs"])
    """

    _closed = True

    def __init__(self, schema: ExperienceSchema) -> None:
        """Open it.

        Raises:
            ChannelError: there is no memory for it.
        """
        self.schema = schema
        self._layouts = Layouts(schema)
        message = self._layouts.schema_message()
        self._file = SharedFile.create(schema.name, at.INBOX_SCHEMA_AT + len(message))
        self._file.bytes[at.INBOX_SCHEMA_AT : at.INBOX_SCHEMA_AT + len(message)] = message
        self._words = words = self._file.words
        words[at.INBOX_PID], words[at.INBOX_SCHEMA_BYTES] = os.getpid(), len(message)
        words[at.MAGIC] = at.INBOX_MAGIC
        self._links: list[Link] = []
        self._knocks = self._file.bytes[at.KNOCKS_AT * at.WORD : at.INBOX_SCHEMA_AT]
        self._heard = bytes(self._knocks)
        self._answered = [0] * at.MAX_PRODUCERS
        self._processes = Processes()
        self._looked_at = time.monotonic()
        self._next = 0
        self._closed = False
        self._leaked: list[int] = []
        self.lost: list[int] = []
        """Producers whose process ended without a goodbye, in the order in which that was noticed."""

    @property
    def endpoint(self) -> str:
        """What producers attach to."""
        return self._file.endpoint

    @property
    def producers(self) -> tuple[int, ...]:
        """Those that have knocked, and are alive or have left something; none once this is closed."""
        if not self._closed:
            self._answer()
            self._all_left()
            self._bury()
        return tuple(link.producer for link in self._links)

    @property
    def leaks(self) -> int:
        """Batches that were released too early, or never."""
        return len(self._leaked)

    def take(self, timeout_s: float = 60.0) -> Batch | None:
        """The next batch, of the producers in turn; None once producers came and all have left and are drained.

        Raises:
            ChannelTimeoutError: nothing came within the time limit.
            SchemaError: a producer sends something else.
        """
        begin = now = time.monotonic()
        while True:
            self._check_open()
            seen = self._words[at.BELL]
            self._answer()
            if now - self._looked_at >= _SLEEP_S:
                self._bury()
            batch = self._look()
            if batch is not None:
                return batch
            if self._all_left():
                return None
            now = time.monotonic()
            if now - begin >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._who_is_silent(), now - begin)
            if now - begin < _OFFER_S:
                os.sched_yield()
            else:
                futex.sleep(self._file.word_address(at.BELL), seen, min(_SLEEP_S, timeout_s - (now - begin)))

    def close(self) -> None:
        """Take nothing any more: producers give what was not taken to others. Batches that are out stay valid.

        Safe to call twice.
        """
        if not self._closed:
            self._closed = True
            self._words[at.INBOX_CLOSED] = 1
            self._links = []
            self._processes.close()
            self._file.close()

    def _look(self) -> Batch | None:
        for offset in range(len(self._links)):
            index = (self._next + offset) % len(self._links)
            slot = self._links[index].next_slot()
            if slot is not None:
                self._next = index + 1
                return Batch(self._links[index], slot)
        return None

    def _answer(self) -> None:
        """Connect to producers that have knocked since.

        Raises:
            SchemaError: one sends something else. It is asked no more.
        """
        knocks = bytes(self._knocks)
        if knocks == self._heard:
            return
        for producer, known in enumerate(self._answered):
            knock = self._words[at.KNOCKS_AT + producer]
            if knock != known:
                self._answered[producer] = knock
                self._connect(producer, at.endpoint_in(knock))
        self._heard = knocks

    def _connect(self, producer: int, endpoint: str) -> None:
        try:
            link = Link(self._layouts, endpoint, self._file, self._leaked)
        except SchemaError:
            raise
        except ChannelError as error:  # it knocked, and left before anyone answered
            if _has_ended(at.pid_of(endpoint)):  # else by itself
                self._lose(producer, error.detail)
            return
        self._links.append(link)
        self._processes.watch(link.pid)

    def _all_left(self) -> bool:
        """Whether every producer that came has left and is drained; lets go of those that have."""
        for _ in range(2):  # one may have come just before another left
            gone = [link for link in self._links if link.is_over and not link.has_more]
            self._let_go(gone)
            if self._links or not any(self._answered):
                return False
            self._answer()
        return not self._links

    def _bury(self) -> None:
        """Let go of producers whose process has ended and that have left nothing more."""
        self._looked_at = time.monotonic()
        ended = self._processes.ended()
        gone = [link for link in self._links if link.pid in ended and not link.has_more]
        self._let_go(gone)
        for link in gone:
            if not link.is_over:
                self._lose(link.producer, f"its process {link.pid} has ended")

    def _let_go(self, gone: list[Link]) -> None:
        if gone:
            self._links = [link for link in self._links if link not in gone]
            self._processes.watch_only(link.pid for link in self._links)

    def _lose(self, producer: int, how: str) -> None:
        self.lost.append(producer)
        _logger.warning("channel %r: producer %d was lost: %s", self.schema.name, producer, how)

    def _who_is_silent(self) -> str:
        names = ", ".join(f"producer {link.producer} (process {link.pid})" for link in self._links)
        return f"nothing came of {names}" if names else "no producer has come"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, "this inbox is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then the process ends, which producers notice as such
            self.close()


def _has_ended(pid: int) -> bool:
    processes = Processes([pid])
    try:
        return bool(processes.ended())
    finally:
        processes.close()
