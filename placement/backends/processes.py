"""Helpers for processes that are not our children: find them, read their environment, wait for a condition."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Poll until the condition holds; False on timeout."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def own_processes(names: tuple[str, ...]) -> list[int]:
    """This user's processes that run one of these programs, directly or through an interpreter."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = (entry / "cmdline").read_bytes().split(b"\0")[:4]
            if entry.stat().st_uid == os.getuid() and {os.path.basename(os.fsdecode(w)) for w in words} & {
                *names
            }:
                found.append(int(entry.name))
    return found


def environment_of(pid: int) -> set[bytes]:
    """Initial environment of a process as ``NAME=value``; empty if it has ended or is not readable."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def last_line(text: str) -> str:
    """The last non-empty line, truncated for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
