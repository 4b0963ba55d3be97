"""What reaches other hosts, for processes that send experience there and follow parameters from there."""

from __future__ import annotations

from typing import Protocol

from collectives.experience.directory import Consumer
from collectives.experience.dispenser import Dispenser
from collectives.experience.parameters import ReadableBoard
from collectives.experience.ways import Way


class Abroad(Protocol):
    """One process's ways to other hosts."""

    def __call__(self, dispenser: Dispenser, consumer: Consumer) -> Way:
        """To a consumer: what a ``Migrator`` takes as ``far_way``."""
        ...

    def board(self, node: str, endpoint: str) -> ReadableBoard:
        """A board that a process of this node hosts there."""
        ...

    def close(self) -> None:
        """Let go of all of them. Safe to call twice."""
        ...
