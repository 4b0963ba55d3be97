"""When a measurement has warmed up, and when it is known well enough. Pure functions of iteration times.

Warm-up is found by the MSER rule (White, 1997, "An effective truncation heuristic for bias reduction in simulation
output"): of the first half of the series, leave out as many values as make the standard error of the rest smallest. The
first iteration is always left out: memory is touched and threads are started in it. So are as many as the caller knows to
be unlike the rest: robots that were just put down cost less than robots that touch the ground.
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
    """What a series of iteration times says once its warm-up is left out."""

    warm_up: int
    """Values left out at the start."""
    num_kept: int
    mean_s: float
    relative_error: float
    """Half of the mean's 95 % confidence interval, relative to it; infinite for a single value."""


def trim_warmup(seconds: Sequence[float], least: int = 1) -> SteadyState:
    """Leave out the warm-up, and say how well the rest determines its mean.

    Args:
        seconds: of each iteration
        least: how many are left out at least, 1 or more

    Raises:
        ValueError: nothing would be left.
    """
    if len(seconds) <= least:
        raise ValueError(
            f"{len(seconds)} iteration times: at least {least + 1} are needed, since the first {least} do not count"
        )
    candidates = range(least, max(least, len(seconds) // 2) + 1)
    warm_up = min(candidates, key=lambda count: (_squared_error(seconds[count:]), count))
    kept = seconds[warm_up:]
    mean = sum(kept) / len(kept)
    half = _t_95(len(kept) - 1) * math.sqrt(_variance(kept) / len(kept)) if len(kept) > 1 else math.inf
    return SteadyState(warm_up=warm_up, num_kept=len(kept), mean_s=mean, relative_error=half / mean)


def _squared_error(values: Sequence[float]) -> float:
    """MSER's statistic: the sum of squared deviations over the squared number of values; 0 for a single one."""
    if len(values) < 2:
        return math.inf
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) ** 2


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _t_95(freedom: int) -> float:
    return _T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.5 / freedom
