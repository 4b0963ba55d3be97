"""What reductions cost while a group trains, and whether another schedule would cost it less."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from collectives.planner import CompositionPlan
from collectives.schedule import Schedule

COUNTED_REDUCTIONS = 16
"""Reductions that show which bucket is the run's, before any is timed."""
TIMED_REDUCTIONS = 32
"""Reductions of that bucket that are timed, for each comparison."""


class ScheduleTuner:
    """Confronts a group's plan with its own reductions, for the bucket that carries most of its bytes.

    In rounds: which bucket that is is counted; then so many of its reductions are timed, and the plan is confronted with
    them, until a round leaves the choice as it is. The next round then begins after twice as many reductions as before.
    All members come to the same choices at the same reduction.
    """

    def __init__(self, plan: CompositionPlan, clock: Callable[[], float] = time.perf_counter) -> None:
        """``plan``: the one in use, with what is known before training; ``clock``: in seconds."""
        self.plan = plan.without_measurements()
        self._clock = clock
        self._gap = COUNTED_REDUCTIONS
        self._until_round = 0
        self._bytes: Counter[int] = Counter()
        self._num_counted = 0
        self._seconds: list[float] = []

    def begin(self, bucket: Tensor) -> float | None:
        """Called before a reduction: when it begins, if it is to be timed."""
        timing = (
            self._until_round == 0
            and self._num_counted >= COUNTED_REDUCTIONS
            and bucket.nbytes == self.plan.nbytes
        )
        return self._now(bucket.device) if timing else None

    def end(self, bucket: Tensor, begin: float | None, largest: Callable[[Tensor], None]) -> Schedule | None:
        """Called after a reduction that all members completed; returns a schedule that is to take over.

        Args:
            bucket: what was reduced
            begin: what ``begin`` returned
            largest: reduces a float64 tensor on the host in place to the largest of all members' elements
        """
        if self._until_round > 0:
            self._until_round -= 1
            return None
        if self._num_counted < COUNTED_REDUCTIONS:
            self._num_counted += 1
            self._bytes[bucket.nbytes] += bucket.nbytes
            return (
                self._for_size(max(self._bytes, key=self._rank))
                if self._num_counted == COUNTED_REDUCTIONS
                else None
            )
        if begin is None:
            return None
        self._seconds.append(self._now(bucket.device) - begin)
        return self._update_plan(largest) if len(self._seconds) == TIMED_REDUCTIONS else None

    def _rank(self, nbytes: int) -> tuple[int, int]:
        return self._bytes[nbytes], nbytes

    def _for_size(self, nbytes: int) -> Schedule | None:
        """Plan for the bucket that is reduced here, whatever the plan was made for."""
        before = self.plan.schedule
        if nbytes != self.plan.nbytes:
            self.plan = self.plan.for_size(nbytes)
        return None if self.plan.schedule == before else self.plan.schedule

    def _update_plan(self, largest: Callable[[Tensor], None]) -> Schedule | None:
        """Choose by what the round has timed.

        A member that comes early waits for the others: what a reduction costs is the least of all members' times, that of
        the last to come.
        """
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
        """Now, with all work before it done: on a GPU reductions are only queued. [unverified on GPU]"""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._clock()
