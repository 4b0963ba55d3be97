"""Migrator (GMI-DRL §3.2.2): discovers the consumers of a channel set, and routes each transfer to one of them."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from collectives.experience.directory import ConsumerAnnouncement, Directory, consumer_key
from collectives.experience.dispenser import Dispenser, least_backlog
from collectives.experience.errors import ChannelError, SchemaError
from collectives.experience.parameters import ReadableParameterStore
from collectives.experience.routes import Route, SharedMemoryRoute
from collectives.rendezvous import host_identity

_logger = logging.getLogger(__name__)

_POLL_S = 0.5
"""Polling interval of the directory while a consumer is attached."""
_SEARCH_S = 0.05
"""Polling interval while none is."""


class RemoteTransport(Protocol):
    """Connections of one process to other hosts: routes for experience, parameter stores for reading."""

    def __call__(self, dispenser: Dispenser, consumer: ConsumerAnnouncement) -> Route:
        """Route to a consumer."""

    def parameter_store(self, node: str, endpoint: str) -> ReadableParameterStore:
        """Parameter store of a process on this node."""

    def close(self) -> None:
        """Close all of them. Safe to call twice."""


class Migrator:
    """Router of one dispenser. Runs within the calls of the dispenser, without a thread of its own.

    ::

        migrator = Migrator(dispenser, directory, "experience")      # attaches consumers from now on
        dispenser.open(); dispenser.send(version=0)
    """

    def __init__(
        self,
        dispenser: Dispenser,
        directory: Directory,
        name: str,
        *,
        consumers: int | None = None,
        together: int = 1,
        remote_route: RemoteTransport | None = None,
    ) -> None:
        """Become the router of this dispenser, for the consumers that announce themselves under ``consumers/NAME/INDEX``.

        ``consumers``: their number; everything then goes to consumer ``producer % consumers`` (synchronous templates).
        None: each transfer goes to the consumer with the least backlog. ``together``: consumers that wait for each other;
        nothing goes to one of them before all are attached, else the first could hold all slots.
        ``remote_route`` creates routes to consumers on other hosts; None: such consumers are an error.
        """
        self._dispenser, self._directory, self._name = dispenser, directory, name
        self._fixed = None if consumers is None else dispenser.producer % consumers
        self._remote_route, self._together = remote_route, together
        self._host_id = host_identity()
        self._known: dict[int, str] = {}
        """Announcement of each consumer that was attached last; a successor announces another text."""
        self._unreachable: dict[int, str] = {}
        """Last announcement of each consumer that could not be attached; it is tried again."""
        self._polled_s = float("-inf")
        dispenser.router = self

    def discover_consumers(self) -> None:
        """Attach consumers whose announcement is new. The dispenser has detached those that are gone.

        Raises:
            SchemaError: a consumer expects another schema.
            ChannelError: a consumer is on another host, and there is no route to it.
        """
        here = self._dispenser.consumers()
        found = len(here) >= self._together if self._fixed is None else self._fixed in here
        now = time.monotonic()
        if now - self._polled_s < (_POLL_S if found else _SEARCH_S):
            return
        self._polled_s = now
        prefix = consumer_key(self._name)
        for key, text in self._directory.announced(prefix).items():
            index = int(key.removeprefix(prefix))
            if self._fixed in (None, index) and self._known.get(index) != text:
                self._attach(index, text)

    def route(self, sequence: int) -> int | None:
        """Index of the consumer for all parts of a sequence number; None while no consumer has credit."""
        if self._fixed is None:
            all_here = len(self._dispenser.consumers()) >= self._together
            return least_backlog(self._dispenser) if all_here else None
        return self._fixed if self._dispenser.has_credit(self._fixed) else None

    def _attach(self, index: int, text: str) -> None:
        consumer = ConsumerAnnouncement.from_text(text)
        try:
            self._dispenser.attach_route(index, self._route_to(index, consumer))
        except SchemaError:
            raise
        except ChannelError as error:  # gone already, or short of something for a moment
            if self._unreachable.get(index) != text:
                self._unreachable[index] = text
                _logger.warning("consumer %d of %r cannot be reached: %s", index, self._name, error)
        else:
            self._known[index] = text

    def _route_to(self, index: int, consumer: ConsumerAnnouncement) -> Route:
        if consumer.host_id == self._host_id:
            return SharedMemoryRoute(self._dispenser.rings, consumer.endpoints)
        if self._remote_route is None:
            raise SchemaError(
                self._name,
                f"consumer {index} is on another host, and there is no route to other hosts: "
                "place it on this host, or pass remote_route",
            )
        return self._remote_route(self._dispenser, consumer)
