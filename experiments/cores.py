"""What the kernel has counted of all cores since it started, from /proc/stat; CPU time of one process."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def used_seconds() -> float:
    """CPU time of everything on this machine."""
    fields = _ticks()
    return (sum(fields[:7]) - fields[3] - fields[4]) / TICKS_PER_S


def stolen_seconds() -> float:
    """What a virtual machine's host kept from it while something wanted to run there; 0 on a machine of its own."""
    return _ticks()[7] / TICKS_PER_S


def not_idle_seconds() -> float:
    """Used or stolen: time in which a measurement that begins now would have had to share."""
    return used_seconds() + stolen_seconds()


def all_seconds() -> float:
    """Of all cores, idle time included."""
    return sum(_ticks()) / TICKS_PER_S


def _ticks() -> list[int]:
    """User, nice, system, idle, iowait, irq, softirq, steal."""
    return [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def process_cpu_s(pid: int) -> float | None:
    """CPU seconds so far of a process, its threads included; None if it has ended and was waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # before the file was opened, or between that and its read
        return None
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
