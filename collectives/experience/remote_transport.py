"""What reaches other hosts, for processes that send experience there and follow parameters from there."""

from __future__ import annotations

from typing import Protocol

from collectives.experience.directory import ConsumerAnnouncement
from collectives.experience.dispenser import Dispenser
from collectives.experience.parameters import ReadableParameterStore
from collectives.experience.routes import Route


class RemoteTransport(Protocol):
    """One process's ways to other hosts."""

    def __call__(self, dispenser: Dispenser, consumer: ConsumerAnnouncement) -> Route:
        """To a consumer: what a ``Migrator`` takes as ``remote_route``."""
        ...

    def parameter_store(self, node: str, endpoint: str) -> ReadableParameterStore:
        """A board that a process of this node hosts there."""
        ...

    def close(self) -> None:
        """Let go of all of them. Safe to call twice."""
        ...
