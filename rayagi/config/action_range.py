"""Warns of boxes of actions that are far from the first actions of a Gaussian policy."""

from __future__ import annotations

import math
from collections.abc import Callable

from actors.protocols import EnvInfo
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import RunSpec

_LEAST_SHARE = 0.1
"""Of the first actions that should be inside the box, in each dimension."""
_MOST_DEVIATIONS = 20
"""Width of a box in standard deviations, but at least in ones: outputs of a network are of this size."""


def warn_of_action_range(spec: RunSpec, info: EnvInfo, log: Callable[[str], object]) -> None:
    """Log one line if clipping leaves hardly any of a Gaussian policy's first actions: it may then never learn.

    A run that explores draws its first actions from N(0, exp(initial_log_std)^2). It learns nothing from a clipped one.
    Off-policy algorithms scale their actions to the box, and offline ones explore nothing.
    """
    network, action = spec.network, info.action
    if isinstance(spec.learning, OffPolicySpec | OfflineSpec) or network.head not in ("auto", "gaussian"):
        return
    if action.kind != "continuous":
        return
    std = math.exp(network.initial_log_std)
    ranges = list(zip(action.low, action.high, strict=True))
    unfit = [i for i, (low, high) in enumerate(ranges) if low < high and not _meets(low, high, std)]
    if not unfit:
        return
    low, high = ranges[unfit[0]]
    bounded = all(math.isfinite(low) and math.isfinite(high) and low < high for low, high in ranges)
    others = f" (and {len(unfit) - 1} more)" if len(unfit) > 1 else ""
    remedy = (
        "use network.head=squashed_gaussian, or wrap it into gymnasium.wrappers.RescaleAction from -1 to 1"
        if bounded
        else "wrap it into gymnasium.wrappers.TransformAction with a range around [-1, 1]"
    )
    log(
        f"{info.env_id}: action {unfit[0]}{others} is between {low:g} and {high:g}, and the first actions are "
        f"N(0, {std:.2g}^2), clipped to it: the policy may never learn; {remedy}"
    )


def _meets(low: float, high: float, std: float) -> bool:
    """Whether enough of N(0, std^2) lies inside a range, which is not far wider."""
    # P(low < a < high) = (erf(high / (sqrt(2) std)) - erf(low / (sqrt(2) std))) / 2
    upper, lower = (math.erf(bound / (math.sqrt(2) * std)) for bound in (high, low))
    wide = math.isfinite(high - low) and high - low > _MOST_DEVIATIONS * max(std, 1.0)
    return (upper - lower) / 2 >= _LEAST_SHARE and not wide
