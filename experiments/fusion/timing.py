"""Rates, and how much of the machine something else used meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from experiments.cores import not_idle_seconds


class Neighbours:
    """Cores that other processes used between the making of this object and ``cores()``."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), not_idle_seconds(), time.process_time()

    def cores(self) -> float:
        """Mean number of cores. The system's clock ticks every 10 ms: over less than half a second this is rough."""
        wall = max(1e-3, time.monotonic() - self._began)
        others = not_idle_seconds() - self._busy - (time.process_time() - self._own)
        return round(max(0.0, others) / wall, 2)


class Cost(NamedTuple):
    """Seconds of one call."""

    wall: float
    cpu: float
    """Of all threads: what is left of a measurement on a machine that does other things, too."""

    def rates(self, steps: float) -> dict[str, float]:
        """Steps per second of both."""
        return {"steps_per_s": steps / self.wall, "steps_per_cpu_s": steps / max(self.cpu, 1e-9)}


def cost(call: Callable[[], object], wait: Callable[[], object], at_least_s: float) -> Cost:
    """The mean of as many calls as take ``at_least_s``, after one that does not count.

    Calls are asked for without waiting, as a training loop would; ``wait`` returns when the device has done them all.
    """
    call()
    wait()
    count = 1
    while True:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            call()
        wait()
        elapsed, used = time.perf_counter() - began, time.process_time() - used
        if elapsed >= at_least_s:
            return Cost(elapsed / count, used / count)
        count = min(10 * count, 1 + int(1.2 * count * at_least_s / max(elapsed, 1e-9)))
