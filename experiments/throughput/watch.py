"""Runs a command and measures its cores and memory, and the cores that something else used meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.cores import TICKS_PER_S, stolen_seconds, used_seconds

WaitPolicy = Literal["PASSIVE", "ACTIVE"] | None
"""Whether OpenMP's idle threads sleep (PASSIVE) or spin; None: its default, which is to spin for some milliseconds."""
EITHER: tuple[WaitPolicy, ...] = (None, "PASSIVE")
"""Which is faster differs by library and task, by up to a half."""
_MARK = "RAYAGI_MEASURED"


@dataclass(frozen=True)
class Watched:
    """A command that ended."""

    output: str
    error: str
    own_cores: float
    """Mean number of cores that the command and everything it started used."""
    other_cores: float
    """Mean number of cores that anything else used, as far as this machine's own kernel sees it."""
    stolen_cores: float
    """Mean number of cores that a virtual machine's host kept from it while something wanted to run there."""
    memory_mib: float
    """Most memory of the command and everything it started, pages that they share counted as one; sampled."""


def run_watched(command: list[str], timeout_s: float, *, waiting: WaitPolicy = "PASSIVE") -> Watched:
    """Run a command to its end; whatever it started and left behind is ended too.

    ``waiting``: how OpenMP's idle threads do.

    Raises:
        TimeoutError: it did not end within ``timeout_s``.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark}
    if waiting is not None:
        environment["OMP_WAIT_POLICY"] = waiting
    own_ticks: dict[int, int] = {}
    memory = [0]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(2.0):
            found = _ticks_of(mark)
            own_ticks.update(found)
            memory.append(sum(map(_memory_kib, found)))

    used, stolen, began = used_seconds(), stolen_seconds(), time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        output, error = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no end within {timeout_s:.0f} s") from None
    finally:
        ended.set()
        sampler.join()
        for pid in _ticks_of(mark):
            os.kill(pid, signal.SIGKILL)
    wall_s = time.monotonic() - began
    own = sum(own_ticks.values()) / TICKS_PER_S
    others = max(0.0, used_seconds() - used - own)
    stolen = stolen_seconds() - stolen
    return Watched(
        output,
        error,
        own_cores=round(own / wall_s, 2),
        other_cores=round(others / wall_s, 2),
        stolen_cores=round(stolen / wall_s, 3),
        memory_mib=round(max(memory) / 1024),
    )


def _memory_kib(pid: int) -> int:
    """Proportional set size: of a page that n processes share, an nth. 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def _ticks_of(mark: str) -> dict[int, int]:
    """CPU ticks so far of every process that carries the mark in its environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                found[int(folder.name)] = int(fields[11]) + int(fields[12])
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
    return found
