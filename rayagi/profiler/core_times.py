"""What a process got of its host's cores: time on them, time ready without one, and what the hypervisor took away."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

NAMES = ("wall_ns", "cpu_ns", "queue_ns", "stolen_ns")
"""Of one process: time that passed, CPU time of all threads, and time in which threads, of those that live at its end, were
ready but had no core. Of the whole host: core time that went to other machines of the same hardware (steal)."""
_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CoreTimes:
    """Readings at one moment; only differences mean something. 0 for what the kernel does not count."""

    wall_ns: int
    cpu_ns: int
    queue_ns: Mapping[int, int]
    """By thread."""
    stolen_ns: int

    def since(self, before: CoreTimes) -> dict[str, int]:
        """The values of NAMES between two moments."""
        # A thread that has ended took its value along; a number that another thread has by now begins anew.
        queued = sum(max(0, ns - before.queue_ns.get(thread, 0)) for thread, ns in self.queue_ns.items())
        passed = (
            self.wall_ns - before.wall_ns,
            self.cpu_ns - before.cpu_ns,
            queued,
            self.stolen_ns - before.stolen_ns,
        )
        return dict(zip(NAMES, passed, strict=True))


def core_times() -> CoreTimes:
    """The readings now."""
    return CoreTimes(time.monotonic_ns(), time.process_time_ns(), _queue_ns(), _stolen_ns())


def _queue_ns() -> dict[int, int]:
    """Of each thread's nanoseconds on a core, nanoseconds runnable without one, number of time slices: the second."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        # A thread that ended, or a kernel without CONFIG_SCHED_INFO.
        with suppress(OSError, IndexError, ValueError):
            found[int(thread.name)] = int((thread / "schedstat").read_bytes().split()[1])
    return found


def _stolen_ns() -> int:
    with suppress(OSError, IndexError, ValueError), open("/proc/stat", encoding="ascii") as file:
        # "cpu", then ticks: user, nice, system, idle, iowait, irq, softirq, steal
        return int(file.readline().split()[8]) * _NS_PER_TICK
    return 0
