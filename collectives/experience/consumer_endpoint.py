"""Consumer endpoint of a channel: takes batches of all connected producers, as views of their memory."""

from __future__ import annotations

import logging
import os
import sys
import time

from collectives import futex
from collectives.closing import ClosesOnExit
from collectives.experience import file_layout
from collectives.experience.batch import Batch, ProducerLink
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.file_layout import SharedFile
from collectives.experience.messages import MessageLayouts
from collectives.experience.schema import ExperienceSchema
from collectives.process_watcher import ProcessWatcher

_logger = logging.getLogger(__name__)

_YIELD_S = 200e-6
"""How long ``take`` yields the core to other threads before it sleeps: the producer may be about to post."""
_SLEEP_S = 0.05
"""Longest sleep, and the interval at which a consumer checks whether its producers are alive."""


class ConsumerEndpoint(ClosesOnExit):
    """One consumer of a channel. Not thread-safe; but any thread may release batches.

    ::

        consumer = ConsumerEndpoint(schema)           # producers attach to consumer.endpoint
        with consumer.take(timeout_s=10.0) as batch:
            learn(batch["obs"])
    """

    _closed = True

    def __init__(self, schema: ExperienceSchema) -> None:
        """Create the shared-memory file.

        Raises:
            ChannelError: there is not enough memory.
        """
        self.schema = schema
        self._layouts = MessageLayouts(schema)
        message = self._layouts.schema_message()
        self._file = SharedFile.create(schema.name, file_layout.CONSUMER_SCHEMA_AT + len(message))
        self._file.bytes[file_layout.CONSUMER_SCHEMA_AT : file_layout.CONSUMER_SCHEMA_AT + len(message)] = (
            message
        )
        self._words = words = self._file.words
        words[file_layout.CONSUMER_PID], words[file_layout.CONSUMER_SCHEMA_BYTES] = os.getpid(), len(message)
        words[file_layout.MAGIC] = file_layout.CONSUMER_MAGIC
        self._links: list[ProducerLink] = []
        self._connect_requests = self._file.bytes[
            file_layout.CONNECT_REQUESTS_AT * file_layout.WORD : file_layout.CONSUMER_SCHEMA_AT
        ]
        self._last_requests = bytes(self._connect_requests)
        self._accepted_requests = [0] * file_layout.MAX_PRODUCERS
        self._processes = ProcessWatcher()
        self._checked_at = time.monotonic()
        self._next = 0
        self._closed = False
        self._leaked: list[int] = []
        self.lost: list[int] = []
        """Producers whose process ended without closing the ring, in the order in which that was detected."""

    @property
    def endpoint(self) -> str:
        """Address that producers attach to."""
        return self._file.endpoint

    @property
    def producers(self) -> tuple[int, ...]:
        """Connected producers that are alive or have batches left; none once this endpoint is closed."""
        if not self._closed:
            self._accept_connections()
            self._all_producers_gone()
            self._reap_dead_peers()
        return tuple(link.producer for link in self._links)

    @property
    def leaks(self) -> int:
        """Batches that were released too early, or never."""
        return len(self._leaked)

    def take(self, timeout_s: float = 60.0) -> Batch | None:
        """The next batch, round-robin over producers. None once at least one has connected, all are gone and drained.

        Raises:
            ChannelTimeoutError: no batch came within the time limit.
            SchemaError: a producer sends another schema.
        """
        begin = now = time.monotonic()
        while True:
            self._check_open()
            # Load the doorbell before checking the queues: a post in between changes it, and ``futex.sleep`` returns.
            doorbell = self._words[file_layout.DOORBELL]
            self._accept_connections()
            if now - self._checked_at >= _SLEEP_S:
                self._reap_dead_peers()
            batch = self._next_batch()
            if batch is not None:
                return batch
            if self._all_producers_gone():
                return None
            now = time.monotonic()
            if now - begin >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._timeout_detail(), now - begin)
            if now - begin < _YIELD_S:
                os.sched_yield()
            else:
                futex.sleep(
                    self._file.word_address(file_layout.DOORBELL),
                    doorbell,
                    min(_SLEEP_S, timeout_s - (now - begin)),
                )

    def close(self) -> None:
        """Stop taking: producers post what was not taken to other consumers. Batches that were taken stay valid.

        Safe to call twice.
        """
        if not self._closed:
            self._closed = True
            self._words[file_layout.CONSUMER_CLOSED] = 1
            self._links = []
            self._processes.close()
            self._file.close()

    def _next_batch(self) -> Batch | None:
        for offset in range(len(self._links)):
            index = (self._next + offset) % len(self._links)
            slot = self._links[index].next_slot()
            if slot is not None:
                self._next = index + 1
                return Batch(self._links[index], slot)
        return None

    def _accept_connections(self) -> None:
        """Connect to producers whose connect request is new.

        Raises:
            SchemaError: a producer sends another schema. Its request is not tried again.
        """
        # One copy of all request words, compared at once: this runs in every ``take``.
        requests = bytes(self._connect_requests)
        if requests == self._last_requests:
            return
        for producer, known in enumerate(self._accepted_requests):
            connect_request = self._words[file_layout.CONNECT_REQUESTS_AT + producer]
            if connect_request != known:
                self._accepted_requests[producer] = connect_request
                self._connect(producer, file_layout.endpoint_in(connect_request))
        self._last_requests = requests

    def _connect(self, producer: int, endpoint: str) -> None:
        try:
            link = ProducerLink(self._layouts, endpoint, self._file, self._leaked)
        except SchemaError:
            raise
        except ChannelError as error:  # closed, or its process ended, before this consumer connected
            if _has_ended(file_layout.pid_of(endpoint)):  # else it was closed on purpose
                self._record_loss(producer, error.detail)
            return
        self._links.append(link)
        self._processes.watch(link.pid)

    def _all_producers_gone(self) -> bool:
        """Drop links to producers that are closed and drained. Returns whether none is left, after at least one."""
        for _ in range(2):  # one may have connected just before another closed
            gone = [link for link in self._links if link.is_closed and not link.has_more]
            self._drop_links(gone)
            if self._links or not any(self._accepted_requests):
                return False
            self._accept_connections()
        return not self._links

    def _reap_dead_peers(self) -> None:
        """Drop links to producers whose process has ended, once their queue is empty, and report them as lost."""
        self._checked_at = time.monotonic()
        ended = self._processes.ended()
        gone = [link for link in self._links if link.pid in ended and not link.has_more]
        self._drop_links(gone)
        for link in gone:
            if not link.is_closed:
                self._record_loss(link.producer, f"its process {link.pid} has ended")

    def _drop_links(self, gone: list[ProducerLink]) -> None:
        if gone:
            self._links = [link for link in self._links if link not in gone]
            self._processes.watch_only(link.pid for link in self._links)

    def _record_loss(self, producer: int, how: str) -> None:
        self.lost.append(producer)
        _logger.warning("channel %r: producer %d was lost: %s", self.schema.name, producer, how)

    def _timeout_detail(self) -> str:
        names = ", ".join(f"producer {link.producer} (process {link.pid})" for link in self._links)
        return f"no batch came from {names}" if names else "no producer has connected"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, "this consumer endpoint is closed")

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit producers detect the end of the process
            self.close()


def _has_ended(pid: int) -> bool:
    processes = ProcessWatcher([pid])
    try:
        return bool(processes.ended())
    finally:
        processes.close()
