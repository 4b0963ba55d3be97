"""Replanning decisions: maps a run's health to nothing, a proposal, or a new plan at the next checkpoint. Pure functions.

A GMI's speed excludes its waiting time, since GMIs that train together all advance at the pace of the slowest. Speeds are
medians over a window, so a few slow iterations change nothing. A finding is cleared at another threshold than it is raised
at (hysteresis), so values near a threshold do not toggle it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from placement.backends.base import SliceHealth

SLOW_BELOW, NORMAL_ABOVE = 0.8, 0.9
"""Fractions of the expected speed: a finding is raised below the first and cleared above the second."""
MEMORY_HIGH_ABOVE, MEMORY_NORMAL_BELOW = 0.9, 0.8
"""Fractions of the memory limit: a finding is raised above the first and cleared below the second."""
REPLAN_GAIN_ABOVE, NO_GAIN_BELOW = 1.05, 1.0
"""Speedup without the slow GMIs: a finding is raised above the first, since a new plan restarts all GMIs."""
HORIZON_WINDOWS = 10
"""Number of windows for which memory growth is extrapolated."""

Finding = tuple[Literal["slow", "memory", "straggler", "share"], int]
"""(kind, GMI). (slow, ALL_GMIS): the whole run is slower than planned. (straggler, ALL_GMIS): the run would be faster
without its slow GMIs. share: the GMI's share of a GPU is degraded or lost."""
ALL_GMIS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiHealth:
    """Measurements of one GMI over the last iterations, oldest first."""

    steps_per_s: tuple[float, ...]
    """Environment steps per second of its own work, without waiting."""
    memory_bytes: tuple[float, ...] = ()
    """Empty: not measured."""
    memory_limit_bytes: int = 0
    driver_bytes: int | None = None
    """GPU memory of its process by the driver's count, including CUDA's own; None: not reported."""
    share: SliceHealth | None = None
    """Health of its slice; None without a partition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    """Input of a decision."""

    gmis: tuple[GmiHealth, ...]
    num_envs: int
    """Environments of one GMI."""
    window: int
    """Iterations that are needed for a decision."""
    planned_steps_per_s: float | None = None
    """Predicted steps per second of one GMI's own work; None without a prediction."""
    may_replan: bool = False
    findings: frozenset[Finding] = frozenset()
    """Active findings of earlier decisions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do, with the reason in numbers."""

    action: Literal["nothing", "propose", "replan"]
    findings: frozenset[Finding]
    """Active findings, the input of the next decision."""
    reason: str = ""
    num_gmis: int = 0
    """GMIs of the proposed plan; 0 if there is no better plan."""
    num_envs: int = 0


def decide(health: RunHealth) -> Decision:
    """Decide from the last window. Only new findings lead to an action, so each is reported once."""
    if any(len(gmi.steps_per_s) < health.window for gmi in health.gmis):
        return Decision(action="nothing", findings=health.findings)
    # 1. Collect the active findings. 2. Report the new ones. 3. Propose a plan: less memory first, then no stragglers.
    slow, memory = _slow(health), _low_memory(health)
    straggler = _straggler_cost(health, {index for _, index in slow} - {ALL_GMIS})
    found = memory | slow | straggler | _unhealthy_shares(health)
    findings = frozenset(found)
    new = findings - health.findings
    if not new:
        return Decision(action="nothing", findings=findings)
    reasons = [text for finding, text in found.items() if finding in new]
    num_gmis, num_envs, outlook = len(health.gmis), health.num_envs, ""
    if any(kind == "memory" for kind, _ in new):
        num_gmis, num_envs, outlook = _smaller_plan(health)
    elif straggler:
        num_gmis -= sum(index != ALL_GMIS for _, index in slow)
    else:
        num_gmis = 0
        if any(kind == "slow" for kind, _ in new):
            outlook = "No other number of GMIs is expected to be faster: check what else runs on the machine"
    return Decision(
        action="replan" if health.may_replan and num_gmis else "propose",
        findings=findings,
        reason="; ".join(reasons) + (f". {outlook}" if outlook else ""),
        num_gmis=num_gmis,
        num_envs=num_envs if num_gmis else 0,
    )


def _slow(health: RunHealth) -> dict[Finding, str]:
    """GMIs that are slower than the median of the others; and whether all are slower than planned."""
    speeds = _speeds(health)
    found: dict[Finding, str] = {}
    planned = health.planned_steps_per_s
    for index, speed in enumerate(speeds):
        others = [other for position, other in enumerate(speeds) if position != index]
        if others and speed < _threshold(health, ("slow", index)) * median(others):
            found["slow", index] = (
                f"GMI {index} runs at {speed:,.0f} steps/s of its own work, the others at {median(others):,.0f}"
            )
    # Slow GMIs are reported individually. The others alone are compared with the prediction.
    rest = [speed for index, speed in enumerate(speeds) if ("slow", index) not in found]
    if planned and rest and median(rest) < _threshold(health, ("slow", ALL_GMIS)) * planned:
        found["slow", ALL_GMIS] = (
            f"GMIs run at {median(rest):,.0f} steps/s of their own work, {planned:,.0f} were predicted"
        )
    return found


def _unhealthy_shares(health: RunHealth) -> dict[Finding, str]:
    """GMIs whose share is degraded or lost. A lost share also raises SliceLostError in the session, which recovers."""
    return {
        ("share", index): f"GMI {index}: {gmi.share.text}"
        for index, gmi in enumerate(health.gmis)
        if gmi.share is not None and gmi.share.state != "ok"
    }


def _threshold(health: RunHealth, finding: Finding) -> float:
    return NORMAL_ABOVE if finding in health.findings else SLOW_BELOW


def _speeds(health: RunHealth) -> list[float]:
    return [median(gmi.steps_per_s[-health.window :]) for gmi in health.gmis]


def _low_memory(health: RunHealth) -> dict[Finding, str]:
    """GMIs that are near their memory limit, or grow towards it."""
    found: dict[Finding, str] = {}
    for index, gmi in enumerate(health.gmis):
        held, limit = gmi.memory_bytes[-health.window :], gmi.memory_limit_bytes
        if (len(held) < health.window and gmi.driver_bytes is None) or limit <= 0:
            continue
        threshold = MEMORY_NORMAL_BELOW if ("memory", index) in health.findings else MEMORY_HIGH_ABOVE
        # The program counts its own memory, the driver that of the whole process. The limit applies to the latter.
        now = max(median(held[-3:] or (0,)), gmi.driver_bytes or 0)
        growth = growth_per_iteration(held) if len(held) >= health.window else 0.0
        ahead = HORIZON_WINDOWS * health.window
        text = f"GMI {index} holds {now / 2**20:,.0f} MiB of {limit / 2**20:,.0f}"
        if now > threshold * limit:
            found["memory", index] = text
        elif now + growth * ahead > threshold * limit:
            found["memory", index] = (
                f"{text} and grows by {growth / 2**20:,.2f} MiB an iteration: "
                f"the limit is {(limit - now) / growth:,.0f} iterations away"
            )
    return found


def growth_per_iteration(held: Sequence[float]) -> float:
    """Sustained growth: the smallest slope among the thirds of a window, so a single allocation does not count."""
    third = max(2, len(held) // 3)
    parts = [held[begin : begin + third] for begin in range(0, len(held) - third + 1, third)]
    return max(0.0, min((part[-1] - part[0]) / (third - 1) for part in parts))


def _straggler_cost(health: RunHealth, stragglers: set[int]) -> dict[Finding, str]:
    """Whether the run would be faster without the stragglers.

    n synchronous GMIs do n * min(speeds) steps per second; without k stragglers, (n - k) * min(other speeds).
    """
    speeds = _speeds(health)
    kept = [speed for index, speed in enumerate(speeds) if index not in stragglers]
    if not stragglers or not kept:
        return {}
    now, then = len(speeds) * min(speeds), len(kept) * min(kept)
    finding: Finding = ("straggler", ALL_GMIS)
    if then < (NO_GAIN_BELOW if finding in health.findings else REPLAN_GAIN_ABOVE) * now:
        return {}
    whom, count = "it" if len(stragglers) == 1 else "them", len(kept)
    gain = f"{then:,.0f} steps/s of own work with {count} instead of {now:,.0f} with {len(speeds)}"
    return {finding: f"excluding {whom} is faster, {gain}"}


def _smaller_plan(health: RunHealth) -> tuple[int, int, str]:
    """(GMIs, environments per GMI, explanation) of a plan that needs less memory; 0 GMIs if there is none."""
    num_gmis, num_envs = len(health.gmis), health.num_envs
    if num_envs > 1:
        return num_gmis, num_envs // 2, f"Half as many environments need less: {num_envs // 2} for each GMI"
    if num_gmis > 1:
        return num_gmis - 1, num_envs, f"Fewer GMIs leave more to each: {num_gmis - 1}"
    return 0, 0, "One GMI with one environment cannot be made smaller: give it more memory"
