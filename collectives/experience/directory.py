"""Where consumers of experience are found: keys and texts that everyone can say and see, and nobody has to remember."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import quote, unquote


class Directory(Protocol):
    """Small texts by key. Calls may be repeated; what is said last under a key counts."""

    def announce(self, key: str, value: str) -> None:
        """Say ``value`` under ``key``."""
        ...

    def announced(self, prefix: str) -> dict[str, str]:
        """All that was said under keys that begin with ``prefix``."""
        ...


class FileDirectory(Directory):
    """One of processes of this host: a file per key in a folder, replaced at once, so that nobody reads half a text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def announce(self, key: str, value: str) -> None:
        """Say ``value`` under ``key``."""
        descriptor, draft = tempfile.mkstemp(dir=self._folder, prefix=".")
        with os.fdopen(descriptor, "w") as file:
            file.write(value)
        os.replace(draft, self._folder / quote(key, safe=""))

    def announced(self, prefix: str) -> dict[str, str]:
        """All that was said under keys that begin with ``prefix``."""
        said = {unquote(path.name): path for path in self._folder.glob("[!.]*")}
        return {key: path.read_text() for key, path in sorted(said.items()) if key.startswith(prefix)}


@dataclass(frozen=True, slots=True)
class ConsumerAnnouncement:
    """Where a consumer takes its experience: what stands under ``consumers/NAME/INDEX``."""

    host_id: str
    """Of processes that share memory with it: see ``collectives.rendezvous.host_identity``."""
    endpoints: tuple[str, ...]
    """Of its inboxes, one per group of the channel plan, in order."""
    identity: str = ""
    """Differs from that of any successor, which may have the same endpoints in text."""
    node: str = ""
    """By which those on other hosts name its host, where they can: see ``RemoteRouteFactory``."""

    def text(self) -> str:
        """As it is announced."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Inverse of ``text``."""
        said = json.loads(text)
        return cls(said["host_id"], tuple(said["endpoints"]), said["identity"], said["node"])


def consumer_key(name: str, index: int | None = None) -> str:
    """Under which a consumer of the channel set ``name`` is announced; without an index what all those begin with."""
    return f"consumers/{name}/{'' if index is None else index}"
