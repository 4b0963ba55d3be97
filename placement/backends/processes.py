"""Processes that are not our children: who they are, and waiting for what they do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until the condition holds; False where it did not within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def own_processes(names: tuple[str, ...]) -> list[int]:
    """This user's processes that run one of these programs, straight or through an interpreter."""
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
    """``NAME=value`` of a process as it was started; empty where it has ended or is not ours to read."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def last_line(text: str) -> str:
    """The last line that is not empty, cut for an error's text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
