"""One process's folder in a profile: who it is, its names, and where its events lie."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collectives.files import replacing
from rayagi.profiler.layout import MAX_NAME, NAMES, PROCESS

_logger = logging.getLogger(__name__)

MAX_NAMES = 100_000
"""Further names are recorded as one, so that names made in a loop do not fill memory and disk."""
_FIRST_NAMES = ("thread", f"more than {MAX_NAMES} names")
_TOO_MANY_ID = 1


class ProcessFolder:
    """Made for the calling process. No file stays open."""

    def __init__(
        self, profile: Path, name: str, metadata: dict[str, Any], texts: Sequence[str] = _FIRST_NAMES
    ) -> None:
        """A forked child takes over the texts of its parent, because native calls go on with their ids."""
        self.path = _make_folder(profile)
        self.name, self.metadata = name, metadata
        self.texts: list[str] = []
        self.ids: dict[str, int] = {}
        self._names_are_lost = self._is_warned = False
        self._clock, self._mark = read_clock(), memory_mark(os.getpid())
        self.add_names(list(texts))
        self.describe()

    def describe(self, **more: Any) -> None:
        """Write process.json, with more entries at the end of the session. A full disk is logged once."""
        about = {
            "name": self.name,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "argv": list(getattr(sys, "orig_argv", sys.argv)),
            "metadata": self.metadata,
            "python": platform.python_version(),
            "clock": self._clock,
            "mark": self._mark,
            **more,
        }
        try:
            with replacing(self.path / PROCESS) as beside:
                beside.write_text(json.dumps(about), encoding="utf-8")
        except OSError as error:
            if self._is_warned:
                return
            self._is_warned = True
            _logger.warning("the profile's %s cannot be written: %s", self.path / PROCESS, error.strerror)

    def name_id(self, text: str) -> int | None:
        """The id of a name; None for a new one; that of "more than 100000 names" when there are as many."""
        found = self.ids.get(text)
        if found is None and len(text) > MAX_NAME:
            return self.name_id(text[:MAX_NAME])
        return _TOO_MANY_ID if found is None and len(self.texts) >= MAX_NAMES else found

    def add_names(self, texts: list[str]) -> None:
        """Give ids to new names, and write them before they are used. The caller holds the session's lock."""
        lines = []
        for text in dict.fromkeys(text[:MAX_NAME] for text in texts):
            if text in self.ids or len(self.texts) >= MAX_NAMES:
                continue
            self.ids[text] = len(self.texts)
            lines.append(json.dumps({"id": len(self.texts), "name": text}))
            self.texts.append(text)
        if lines and not self._names_are_lost:
            self._append("\n".join([*lines, ""]).encode())

    def _append(self, text: bytes) -> None:
        """After a failed write the file may end within a line: nothing may follow."""
        try:
            descriptor = os.open(
                self.path / NAMES, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
            try:
                self._names_are_lost = os.write(descriptor, text) != len(text)
            finally:
                os.close(descriptor)
        except OSError:
            self._names_are_lost = True


def read_clock() -> dict[str, int]:
    """Both clocks at one moment: the closest of several brackets of a Unix time by two monotonic ones."""
    best: dict[str, int] | None = None
    for _ in range(5):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        error = (after - before + 1) // 2
        if best is None or error < best["error_ns"]:
            best = {"monotonic_ns": (before + after) // 2, "unix_ns": unix, "error_ns": error}
    assert best is not None
    return best


def _make_folder(profile: Path) -> Path:
    """HOST-PID-STARTTICKS; with a number after it for a process that replaced its program by exec."""
    stem = f"{host_name()}-{os.getpid()}-{start_ticks(read_stat(os.getpid()))}"
    number = 1
    while True:
        path = profile / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def host_name() -> str:
    """This host's, as folders have it."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "host"


def read_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third one on, the process's state.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return status.rpartition(")")[2].split()


def start_ticks(stat: list[str]) -> int:
    """When the process started, in clock ticks since the machine did: with the pid it names a process for good."""
    return int(stat[19])


def memory_mark(pid: int) -> str:
    """Changes when a process replaces its program by exec, and is the same in forked children; empty where it is not known.

    It is made of the address of the stack, and too short to give that away.
    """
    try:
        address = read_stat(pid)[25]
    except OSError:
        return ""
    return "" if address == "0" else hashlib.blake2b(address.encode(), digest_size=2).hexdigest()
