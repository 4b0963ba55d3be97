"""From the recorded iterations to all iterations of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from rayagi.profiler.overlap import NO_ITERATION, Row

_LEVEL = 0.95


@dataclass(frozen=True)
class RunEstimate:
    """An operation's time in a whole run.

    Attributes:
        phase: in which it is
        operation: its name
        iteration_ns: mean of the recorded iterations
        run_ns: of all iterations
        error_ns: half of the 95 % interval of ``run_ns``; None with one recorded iteration
    """

    phase: str
    operation: str
    iteration_ns: float
    run_ns: float
    error_ns: float | None


@dataclass(frozen=True)
class Extrapolation:
    """Times of a run's operations, the longest first, from ``recorded`` of its ``iterations``."""

    recorded: int
    iterations: int
    operations: Sequence[RunEstimate]


def extrapolate(rows: Iterable[Row], iterations: int) -> Extrapolation | None:
    """Estimate the time of each operation in a run, within its iterations.

    The recorded iterations count as a random sample of all: what drifts, such as a growing replay, is not seen.

    Args:
        rows: ``Breakdown.merged``, or those of one process
        iterations: of the run

    Returns:
        None if the run has no more iterations than were recorded, or none was.
    """
    sums: dict[tuple[str, str], Counter[int]] = {}
    for row in rows:
        if row.cell.iteration != NO_ITERATION:
            key = row.cell.phase, row.cell.operation
            sums.setdefault(key, Counter())[row.cell.iteration] += row.ns
    recorded = len({number for values in sums.values() for number in values})
    if not 0 < recorded < iterations:
        return None
    found = [_estimate(*key, list(values.values()), recorded, iterations) for key, values in sums.items()]
    return Extrapolation(
        recorded, iterations, sorted(found, key=lambda each: (-each.run_ns, each.phase, each.operation))
    )


def _estimate(
    phase: str, operation: str, values: Sequence[int], recorded: int, iterations: int
) -> RunEstimate:
    """From an operation's times in the iterations that have it."""
    times = np.zeros(recorded)
    times[: len(values)] = values
    mean, error = float(times.mean()), None
    if recorded > 1:
        # Imported here: it takes 0.2 s, and `rayagi train` needs it only with --profile.
        from scipy.special import stdtrit

        # n of N are known. The others' sum is predicted as (N - n) mean, with variance (N - n)^2 s^2 / n of the mean and
        # (N - n) s^2 of themselves: N (N - n) s^2 / n together.
        spread = float(times.std(ddof=1)) * sqrt(iterations * (iterations - recorded) / recorded)
        error = float(stdtrit(recorded - 1, (1 + _LEVEL) / 2)) * spread
    return RunEstimate(phase, operation, mean, mean * iterations, error)
