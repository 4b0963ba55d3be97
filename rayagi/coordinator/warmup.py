"""Warm-up truncation: removes the warm-up from iteration times and estimates the error of their mean. Pure functions.

MSER rule (White, 1997, "An effective truncation heuristic for bias reduction in simulation output"): drop d values, at most
half of the series, so that the squared standard error of the rest is minimal:

    d* = argmin_d  sum_{i>d} (x_i - mean)^2 / (n - d)^2

The first iteration is always dropped, since it touches memory and starts threads. The caller may require more, since
robots that have just been reset cost less than robots that touch the ground.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyState:
    """Statistics of a series of iteration times without its warm-up."""

    warm_up: int
    """Values dropped at the start."""
    num_kept: int
    mean_s: float
    relative_error: float
    """Half of the mean's 95 % confidence interval, relative to it; infinite for a single value."""


def trim_warmup(seconds: Sequence[float], least: int = 1) -> SteadyState:
    """Drop the warm-up, and compute the mean of the rest with its relative error.

    Args:
        seconds: duration of each iteration
        least: minimum number of dropped values, 1 or more

    Raises:
        ValueError: no value would be left.
    """
    if len(seconds) <= least:
        raise ValueError(
            f"{len(seconds)} iteration times: at least {least + 1} are needed, since the first {least} are dropped"
        )
    candidates = range(least, max(least, len(seconds) // 2) + 1)
    warm_up = min(candidates, key=lambda count: (_squared_error(seconds[count:]), count))
    kept = seconds[warm_up:]
    # 95 % confidence interval of the mean: t * s / sqrt(n)
    mean = float(np.mean(kept))
    half = (
        float(stdtrit(len(kept) - 1, 0.975)) * float(np.std(kept, ddof=1)) / math.sqrt(len(kept))
        if len(kept) > 1
        else math.inf
    )
    return SteadyState(warm_up=warm_up, num_kept=len(kept), mean_s=mean, relative_error=half / mean)


def _squared_error(values: Sequence[float]) -> float:
    """MSER statistic: sum of squared deviations / n^2; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(np.var(values)) / len(values)
