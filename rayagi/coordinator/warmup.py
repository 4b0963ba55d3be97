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

_T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t, two-sided 95 %, for 1 to 20 degrees of freedom; 1.96 to 2.08 beyond."""


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
    mean = sum(kept) / len(kept)
    half = _t_95(len(kept) - 1) * math.sqrt(_variance(kept) / len(kept)) if len(kept) > 1 else math.inf
    return SteadyState(warm_up=warm_up, num_kept=len(kept), mean_s=mean, relative_error=half / mean)


def _squared_error(values: Sequence[float]) -> float:
    """MSER statistic: sum of squared deviations / n^2; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) ** 2


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _t_95(freedom: int) -> float:
    return _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.5 / freedom
