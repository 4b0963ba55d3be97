"""What the kernel has counted of all cores since it started, from /proc/stat."""

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
