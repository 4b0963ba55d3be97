"""Interface of the transport to other hosts: routes for experience, parameter stores for reading."""

from __future__ import annotations

from typing import Protocol

from collectives.experience.directory import ConsumerAnnouncement
from collectives.experience.dispenser import Dispenser
from collectives.experience.parameters import ReadableParameterStore
from collectives.experience.routes import Route


class RemoteTransport(Protocol):
    """Connections of one process to other hosts."""

    def __call__(self, dispenser: Dispenser, consumer: ConsumerAnnouncement) -> Route:
        """Route to a consumer: a ``Migrator`` takes this as ``remote_route``."""

    def parameter_store(self, node: str, endpoint: str) -> ReadableParameterStore:
        """Parameter store of a process on this node."""

    def close(self) -> None:
        """Close all of them. Safe to call twice."""
