"""What a process got of its host's cores: time on them, time ready without one, and what the hypervisor took away."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

NAMES = ("wall_ns", "cpu_ns", "queue_ns", "stolen_ns")
"""Of one process: time that passed, CPU time of all threads, and time in which threads that still live were ready but had no
core. Of the whole host: core time that went to other machines of the same hardware (steal)."""
_NS_PER_TICK = 10**9 // os.sysconf("SC_CLK_TCK")


def core_times() -> dict[str, int]:
    """The values of NAMES since some moment; only differences mean something. 0 for what the kernel does not count."""
    return dict(
        zip(NAMES, (time.monotonic_ns(), time.process_time_ns(), _queue_ns(), _stolen_ns()), strict=True)
    )


def _queue_ns() -> int:
    """Nanoseconds on a core, nanoseconds runnable without one, number of time slices: of each thread."""
    total = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(
            OSError, IndexError, ValueError
        ):  # a thread that ended, a kernel without CONFIG_SCHED_INFO
            total += int(thread.read_bytes().split()[1])
    return total


def _stolen_ns() -> int:
    with suppress(OSError, IndexError, ValueError), open("/proc/stat", encoding="ascii") as file:
        # "cpu", then ticks: user, nice, system, idle, iowait, irq, softirq, steal
        return int(file.readline().split()[8]) * _NS_PER_TICK
    return 0
