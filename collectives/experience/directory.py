"""Service directory: a key-value store in which consumers of experience announce their addresses."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Protocol, Self


class Directory(Protocol):
    """Small texts by key. Calls are idempotent; the last value of a key counts."""

    def announce(self, key: str, value: str) -> object:
        """Store ``value`` under ``key``."""

    def announced(self, prefix: str) -> dict[str, str]:
        """All entries whose key begins with ``prefix``."""


@dataclass(frozen=True, slots=True)
class ScopedDirectory:
    """A scope of a directory: announces under a prefix, and sees what was announced there or in no scope."""

    directory: Directory
    prefix: str

    def announce(self, key: str, value: str) -> None:
        """As in ``Directory``."""
        self.directory.announce(self.prefix + key, value)

    def announced(self, prefix: str) -> dict[str, str]:
        """As in ``Directory``."""
        own = self.directory.announced(self.prefix + prefix)
        scoped = {key.removeprefix(self.prefix): value for key, value in own.items()}
        return {**self.directory.announced(prefix), **scoped}


@dataclass(frozen=True, slots=True)
class ConsumerAnnouncement:
    """Address of a consumer: the entry ``consumers/NAME/INDEX`` of the directory."""

    host_id: str
    """Identity of the host whose processes share memory with it: see ``collectives.rendezvous.host_identity``."""
    endpoints: tuple[str, ...]
    """Consumer endpoints, one per group of the channel plan, in order."""
    identity: str = ""
    """Unique per consumer: a successor may have the same endpoint texts."""
    node: str = ""
    """Name of its host for processes on other hosts (in Ray: the node id): see ``migrator.RemoteTransport``."""

    def text(self) -> str:
        """As JSON, the value in the directory."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Inverse of ``text``."""
        values = json.loads(text)
        return cls(values["host_id"], tuple(values["endpoints"]), values["identity"], values["node"])


def consumer_key(name: str, index: int | None = None) -> str:
    """Directory key of a consumer of the channel set ``name``; without an index, the common prefix of these keys."""
    return f"consumers/{name}/{'' if index is None else index}"
