"""Migrator: finds the consumers of a channel set, and says which of them gets what, and by which way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from collectives.experience.directory import Consumer, Directory, inbox_key
from collectives.experience.dispenser import Dispenser, least_backlog
from collectives.experience.errors import ChannelError, SchemaError
from collectives.experience.ways import Router, SharedMemoryWay, Way
from collectives.rendezvous import host_identity

_logger = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Between looks into the directory while there is a consumer."""
_SEARCH_S = 0.05
"""Between looks while there is none to go on with."""

FarWay = Callable[[Dispenser, Consumer], Way]
"""Makes a way to a consumer on another host."""


class Migrator(Router):
    """Routes one dispenser's experience. It is asked by the dispenser; nothing runs beside it.

    ::

        migrator = Migrator(dispenser, directory, "experience")      # from now on the dispenser finds its consumers
        dispenser.open(); dispenser.send(version=0)
    """

    def __init__(
        self,
        dispenser: Dispenser,
        directory: Directory,
        name: str,
        *,
        consumers: int | None = None,
        far_way: FarWay | None = None,
    ) -> None:
        """Become the dispenser's router.

        Args:
            dispenser: whose experience
            directory: where consumers announce themselves, under ``inbox/NAME/INDEX``
            name: of the channel set
            consumers: how many there are to be: then this producer's experience all goes to one of them, that with
                the producer's number modulo theirs (synchronous templates); None: to the one with the least backlog
            far_way: makes ways to consumers on other hosts; None: those cannot be reached, and are an error
        """
        self._dispenser, self._directory, self._name = dispenser, directory, name
        self._fixed = None if consumers is None else dispenser.producer % consumers
        self._far_way = far_way
        self._host_id = host_identity()
        self._known: dict[int, str] = {}
        """What each consumer announced last. One that is gone announces itself anew when it comes back."""
        self._looked_s = float("-inf")
        self.attached = 0
        """Consumers that were attached so far, replaced ones too."""
        self.routed: dict[int, int] = {}
        """Transfers that each consumer was given."""
        dispenser.router = self

    def look(self) -> None:
        """Attach consumers that have come or come back since; those that are gone the dispenser has let go of.

        Raises:
            SchemaError: a consumer expects something else.
            ChannelError: a consumer is on another host, and there is no way to it.
        """
        here = self._dispenser.consumers()
        found = bool(here) if self._fixed is None else self._fixed in here
        now = time.monotonic()
        if now - self._looked_s < (_LOOK_S if found else _SEARCH_S):
            return
        self._looked_s = now
        prefix = inbox_key(self._name)
        for key, text in self._directory.announced(prefix).items():
            index = int(key.removeprefix(prefix))
            if self._fixed in (None, index) and self._known.get(index) != text:
                self._known[index] = text
                self._attach(index, text)

    def route(self, sequence: int) -> int | None:
        """Index of the consumer that is to have all parts of a sequence; None while nobody has room."""
        if self._fixed is None:
            index = least_backlog(self._dispenser)
        else:
            index = self._fixed if self._dispenser.has_room(self._fixed) else None
        if index is not None:
            self.routed[index] = self.routed.get(index, 0) + 1
        return index

    def _attach(self, index: int, text: str) -> None:
        consumer = Consumer.from_text(text)
        try:
            self._dispenser.attach_way(index, self._way(index, consumer))
        except SchemaError:
            raise
        except ChannelError as error:  # it is gone already: its successor will say so
            _logger.info("consumer %d of %r cannot be reached: %s", index, self._name, error)
        else:
            self.attached += 1

    def _way(self, index: int, consumer: Consumer) -> Way:
        if consumer.host_id == self._host_id:
            return SharedMemoryWay(self._dispenser.outboxes, consumer.endpoints)
        if self._far_way is None:
            raise SchemaError(
                self._name,
                f"consumer {index} is on another host, and nothing was given to carry experience there: "
                "plan it on this host, or pass far_way",
            )
        return self._far_way(self._dispenser, consumer)
