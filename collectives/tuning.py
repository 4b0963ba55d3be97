"""Schedule tuner: times a group's reductions during training, and switches to a cheaper schedule."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from collectives.planner import CompositionPlan
from collectives.schedule import CollectiveSchedule

COUNTED_REDUCTIONS = 16
"""Reductions that determine the bucket to plan for, before any is timed."""
TIMED_REDUCTIONS = 32
"""Timed reductions of that bucket, per comparison."""


class ScheduleTuner:
    """Updates a group's plan with measurements of its own reductions, for the bucket size with most bytes in total.

    Each round has three steps: count COUNTED_REDUCTIONS to find that bucket; time TIMED_REDUCTIONS of it; update the plan
    with their median. Timing repeats until the choice stays. The next round then begins after twice as many reductions as
    the previous one. All members make the same choice at the same reduction.
    """

    def __init__(self, plan: CompositionPlan, clock: Callable[[], float] = time.perf_counter) -> None:
        """``plan``: the current one, with the measurements before training; ``clock``: in seconds."""
        self.plan = plan.without_measurements()
        self._clock = clock
        self._gap = COUNTED_REDUCTIONS
        self._until_round = 0
        self._bytes: Counter[int] = Counter()
        self._num_counted = 0
        self._seconds: list[float] = []

    def begin(self, bucket: Tensor) -> float | None:
        """Called before a reduction; returns its start time if it is to be timed."""
        timing = (
            self._until_round == 0
            and self._num_counted >= COUNTED_REDUCTIONS
            and bucket.nbytes == self.plan.nbytes
        )
        return self._now(bucket.device) if timing else None

    def end(
        self, bucket: Tensor, begin: float | None, largest: Callable[[Tensor], None]
    ) -> CollectiveSchedule | None:
        """Called after a reduction that all members completed; returns the new schedule if it changes.

        ``begin``: what ``begin`` returned; ``largest`` all-reduces a float64 tensor on the host in place, by max.
        """
        if self._until_round > 0:
            self._until_round -= 1
            return None
        if self._num_counted < COUNTED_REDUCTIONS:
            self._num_counted += 1
            self._bytes[bucket.nbytes] += bucket.nbytes
            return (
                self._for_size(max(self._bytes, key=lambda nbytes: (self._bytes[nbytes], nbytes)))
                if self._num_counted == COUNTED_REDUCTIONS
                else None
            )
        if begin is None:
            return None
        self._seconds.append(self._now(bucket.device) - begin)
        return self._update_plan(largest) if len(self._seconds) == TIMED_REDUCTIONS else None

    def _for_size(self, nbytes: int) -> CollectiveSchedule | None:
        """Plan for this bucket size, if the plan was made for another one."""
        before = self.plan.schedule
        if nbytes != self.plan.nbytes:
            self.plan = self.plan.for_size(nbytes)
        return None if self.plan.schedule == before else self.plan.schedule

    def _update_plan(self, largest: Callable[[Tensor], None]) -> CollectiveSchedule | None:
        """Choose by the timed reductions.

        A member that arrives early also measures its wait for the others. So the cost of a reduction is the minimum over
        members, the time of the last to arrive.
        """
        # min(t) = -max(-t): the minimum over members of each reduction, by one all-reduce.
        least = -torch.tensor(self._seconds, dtype=torch.float64)
        largest(least)
        before, seconds = self.plan.schedule, statistics.median((-least).tolist())
        self._seconds.clear()
        if seconds > 0:  # a clock may be too coarse
            self.plan = self.plan.record_measurement(seconds)
        if self.plan.schedule != before:
            return self.plan.schedule
        self._gap *= 2
        self._until_round, self._num_counted = self._gap, 0
        self._bytes.clear()
        return None

    def _now(self, device: torch.device) -> float:
        """Current time, after all queued work of the device. [unverified on GPU]"""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._clock()
