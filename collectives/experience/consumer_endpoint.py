"""Consumer endpoint of a channel: takes batches of all connected producers, as views of their memory."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque

from collectives import futex
from collectives.closing import ClosesOnExit
from collectives.experience import file_layout
from collectives.experience.batch import Batch, ProducerLink
from collectives.experience.descriptors import DescriptorInbox
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.file_layout import SharedFile
from collectives.experience.messages import MessageLayouts
from collectives.experience.schema import ExperienceSchema
from collectives.limits import WaitedTime
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

    def __init__(
        self, schema: ExperienceSchema, leader: ConsumerEndpoint | None = None, page_locked: bool = False
    ) -> None:
        """Create the shared-memory file.

        ``leader``: the consumer's endpoint of the first channel, if this one is of another channel of the same
        producers. Of what a killed producer left, this one then takes only what is asked for by ``claim``.
        ``page_locked``: see ``SharedFile.page_lock``.

        Raises:
            ChannelError: there is not enough memory.
        """
        self.schema, self._leader, self._page_locked = schema, leader, page_locked
        self._owner = os.getpid()
        self._layouts = MessageLayouts(schema)
        message = self._layouts.schema_message()
        self._file = SharedFile.create(schema.name, file_layout.CONSUMER_SCHEMA_AT + len(message))
        self._file.bytes[file_layout.CONSUMER_SCHEMA_AT : file_layout.CONSUMER_SCHEMA_AT + len(message)] = (
            message
        )
        self._words = words = self._file.words
        words[file_layout.CONSUMER_PID], words[file_layout.CONSUMER_SCHEMA_BYTES] = os.getpid(), len(message)
        self._inbox = DescriptorInbox()
        words[file_layout.CONSUMER_TOKEN] = self._inbox.token
        words[file_layout.MAGIC] = file_layout.CONSUMER_MAGIC
        self._left: list[ProducerLink] = []
        """Links to killed producers, until all that they left is released."""
        self._links: list[ProducerLink] = []
        self._connect_requests = self._file.bytes[
            file_layout.CONNECT_REQUESTS_AT * file_layout.WORD : file_layout.CONSUMER_SCHEMA_AT
        ]
        self._last_requests = bytes(self._connect_requests)
        self._has_connected = False
        self._received: deque[int] = deque()
        """Descriptors that producers have sent, and that are not mapped yet."""
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
        """Connected producers that are alive, or have batches left that are not released.

        None once this endpoint is closed.
        """
        if not self._closed:
            self._accept_connections()
            self._all_producers_gone()
            self._reap_dead_peers()
        return tuple(link.producer for link in (*self._links, *self._left))

    @property
    def sending(self) -> set[int]:
        """Producers that are alive, or have batches for this endpoint that it has not taken."""
        with_more = [link for link in self._left if link.has_more]
        return {link.producer for link in (*self._links, *with_more)}

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
        now, waited = time.monotonic(), WaitedTime()
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
            now, waited_s = time.monotonic(), waited.look()
            if waited_s >= timeout_s:
                raise ChannelTimeoutError(self.schema.name, self._timeout_detail(), waited_s)
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                futex.sleep(
                    self._file.word_address(file_layout.DOORBELL),
                    doorbell,
                    min(_SLEEP_S, timeout_s - waited_s),
                )

    def close(self) -> None:
        """Stop taking: producers post what was not taken to other consumers. Batches that were taken stay valid.

        Safe to call twice.
        """
        if self._closed or os.getpid() != self._owner:  # a forked child's copy: the endpoint is its parent's
            return
        self._closed = True
        self._words[file_layout.CONSUMER_CLOSED] = 1
        for link in self._links:
            link.file.close()  # batches keep the mapping; what was inherited keeps its descriptor, which has the lock
        self._links, self._left = [], []
        self._processes.close()
        self._inbox.close()
        while self._received:
            os.close(self._received.popleft())
        self._file.close()

    def claim(self, producer: int, origin: int, sequence: int) -> Batch | None:
        """Take a batch that a killed producer left, for the consumer that has its part in the leader's channel.

        None if there is none, or it was taken. Call it once for each batch.
        """
        for link in self._left:
            if (link.producer, link.origin) == (producer, origin):
                for slot in link.abandoned():
                    if link.words[link.shape.slot_word(slot) + file_layout.SLOT_SEQUENCE] == sequence:
                        return link.inherited_batch(slot)
        return None

    def _next_batch(self) -> Batch | None:
        links = self._links
        for offset in range(len(links)):
            index = (self._next + offset) % len(links)
            batch = links[index].next_batch()
            if batch is not None:
                self._next = index + 1
                return batch
        for link in self._left:
            batch = link.next_batch()
            if batch is not None:
                return batch
        return None

    def _accept_connections(self) -> None:
        """Connect to new producers.

        Raises:
            SchemaError: a producer sends another schema. Its request is not tried again.
        """
        # One copy of all request words, compared at once: this runs in every ``take``. A producer sends its descriptor
        # first and stores its word then.
        requests = bytes(self._connect_requests)
        if requests != self._last_requests or self._received:
            self._last_requests = requests
            self._connect_received()

    def _connect_received(self) -> None:
        refused = None
        try:
            self._received.extend(self._inbox.receive())
        except OSError as error:
            raise self._lacks(error) from error
        while self._received:
            try:
                ring_file = SharedFile.receive(self.schema.name, self._received[0], file_layout.RING_MAGIC)
            except OSError as error:  # it stays, for the next call
                raise self._lacks(error) from error
            except ChannelError as error:
                self._received.popleft()
                self._has_connected = True
                _logger.warning("%s", error)
                continue
            self._received.popleft()
            self._has_connected = True
            try:
                if ring_file.words[file_layout.CLOSED]:  # before this consumer had connected: on purpose
                    continue
                link = ProducerLink(self._layouts, ring_file, self._file, self._leaked)
            except SchemaError as error:
                refused = error
            except ChannelError as error:
                _logger.warning("%s", error)
            else:
                if self._page_locked:
                    ring_file.page_lock()
                self._links.append(link)
                self._processes.watch(link.pid)
        if refused is not None:  # the others are connected
            raise refused

    def _lacks(self, error: OSError) -> ChannelError:
        return ChannelError(
            self.schema.name, f"cannot receive a producer's memory: {error.strerror}. Raise `ulimit -n`"
        )

    def _all_producers_gone(self) -> bool:
        """Drop links to producers that are closed and drained. Returns whether none is left, after at least one."""
        for _ in range(2):  # one may have connected just before another closed
            self._drop_links([link for link in self._links if link.is_closed and not link.has_more])
            if self._links or self._left or not self._has_connected:
                return False
            self._accept_connections()
        return not self._links

    def _reap_dead_peers(self) -> None:
        """Report producers whose process has ended, once their queue is empty, and inherit what they left."""
        self._checked_at = time.monotonic()
        self._connect_received()  # also those that were killed before they stored their connect request
        ended = self._processes.ended()
        gone = [link for link in self._links if link.pid in ended and not link.has_more]
        self._drop_links(gone)
        self._left += [link for link in gone if not link.is_closed]
        for link in list(self._left):
            is_over = link.inherit() if self._leader is None else not self._leader._has_link_like(link)
            if link.has_more:
                continue
            if not link.is_lost:
                link.is_lost = True
                self.lost.append(link.producer)
                _logger.warning(
                    "channel %r: producer %d was lost: its process %d has ended",
                    self.schema.name,
                    link.producer,
                    link.pid,
                )
            if is_over:  # with the link the producer's memory goes
                self._left.remove(link)

    def _has_link_like(self, other: ProducerLink) -> bool:
        """Whether it is connected to another channel's producer, or has not released all of what that left."""
        self._connect_received()
        return any(
            (link.producer, link.origin) == (other.producer, other.origin)
            for link in (*self._links, *self._left)
        )

    def _drop_links(self, gone: list[ProducerLink]) -> None:
        if gone:
            for link in gone:
                if link.is_closed:  # nothing is left to inherit
                    link.file.close()
            self._links = [link for link in self._links if link not in gone]
            self._processes.watch_only(link.pid for link in self._links)

    def _timeout_detail(self) -> str:
        names = ", ".join(
            f"producer {link.producer} (process {link.pid})" for link in (*self._links, *self._left)
        )
        return f"no batch came from {names}" if names else "no producer has connected"

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, "this consumer endpoint is closed")

    def __del__(self) -> None:
        if not sys.is_finalizing():  # at exit producers detect the end of the process
            self.close()
