"""What follows from how a run goes: nothing, a proposal, or a new plan at the next checkpoint. Pure functions.

A GMI's speed is that of its own work: what it waits for others is left out, since GMIs that train together are all as slow
as the slowest. Speeds are medians over a window, so that one slow iteration, or a few, decide nothing. What was noticed is
forgotten at another threshold than it was noticed at: values that hover about one of them do not come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from placement.backends.base import SliceHealth

SLOW_BELOW, NORMAL_ABOVE = 0.8, 0.9
"""Of the speed that was expected: noticed below the first, forgotten above the second."""
MEMORY_HIGH_ABOVE, MEMORY_NORMAL_BELOW = 0.9, 0.8
"""Of the memory limit: noticed above the first, forgotten below the second."""
REPLAN_GAIN_ABOVE, NO_GAIN_BELOW = 1.05, 1.0
"""Times as fast as now, without the slow GMIs: noticed above the first, since a new plan costs a restart of all GMIs."""
HORIZON_WINDOWS = 10
"""How many windows ahead growing memory is followed."""

Finding = tuple[Literal["slow", "memory", "straggler", "share"], int]
"""What was noticed of which GMI. Slow ALL_GMIS: the run as a whole is slower than planned. Drag ALL_GMIS: the others would
be faster without those that are slow. Share: its share of a GPU is not as it should be."""
ALL_GMIS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiHealth:
    """One GMI over the last iterations, oldest first."""

    steps_per_s: tuple[float, ...]
    """Environment steps per second of its own work."""
    memory_bytes: tuple[float, ...] = ()
    """Empty: not measured, or nothing to compare it with."""
    memory_limit_bytes: int = 0
    driver_bytes: int | None = None
    """What its process holds on the GPU by the driver's count, CUDA's own memory included; None where it was not told."""
    share: SliceHealth | None = None
    """Of the slice, asked on its host; None where nothing was carved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    """All that a decision depends on."""

    gmis: tuple[GmiHealth, ...]
    num_envs: int
    """Environments of one GMI."""
    window: int
    """Iterations that must have been seen before anything is decided."""
    planned_steps_per_s: float | None = None
    """Of one GMI's own work, by the plan; None where nothing was predicted."""
    may_replan: bool = False
    findings: frozenset[Finding] = frozenset()
    """By earlier decisions, and not forgotten since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do, with the reason in numbers."""

    action: Literal["nothing", "propose", "replan"]
    findings: frozenset[Finding]
    """For the next health."""
    reason: str = ""
    num_gmis: int = 0
    """Of the proposed plan; 0 where no other plan promises better."""
    num_envs: int = 0


def decide(health: RunHealth) -> Decision:
    """What the last window says: whatever is new is told once, and acted on where that is allowed and worth it."""
    if any(len(gmi.steps_per_s) < health.window for gmi in health.gmis):
        return Decision(action="nothing", findings=health.findings)
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
            outlook = "Another number of GMIs promises nothing better: see what else runs there"
    return Decision(
        action="replan" if health.may_replan and num_gmis else "propose",
        findings=findings,
        reason="; ".join(reasons) + (f". {outlook}" if outlook else ""),
        num_gmis=num_gmis,
        num_envs=num_envs if num_gmis else 0,
    )


def _slow(health: RunHealth) -> dict[Finding, str]:
    """Who is slower than expected, and by how much."""
    speeds = _speeds(health)
    found: dict[Finding, str] = {}
    planned = health.planned_steps_per_s
    for index, speed in enumerate(speeds):
        others = [other for position, other in enumerate(speeds) if position != index]
        if others and speed < _threshold(health, ("slow", index)) * median(others):
            found["slow", index] = (
                f"GMI {index} makes {speed:,.0f} steps per second of its own work, the others {median(others):,.0f}"
            )
    # Stragglers are told by themselves: the rest alone says whether the plan was too hopeful.
    rest = [speed for index, speed in enumerate(speeds) if ("slow", index) not in found]
    if planned and rest and median(rest) < _threshold(health, ("slow", ALL_GMIS)) * planned:
        found["slow", ALL_GMIS] = (
            f"GMIs make {median(rest):,.0f} steps per second of their own work, {planned:,.0f} were planned"
        )
    return found


def _unhealthy_shares(health: RunHealth) -> dict[Finding, str]:
    """Whose share is not as it should be. One that is lost ends what waits for its GMI, and the run goes on from there."""
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
    """Who is near its limit, or grows towards it."""
    found: dict[Finding, str] = {}
    for index, gmi in enumerate(health.gmis):
        held, limit = gmi.memory_bytes[-health.window :], gmi.memory_limit_bytes
        if (len(held) < health.window and gmi.driver_bytes is None) or limit <= 0:
            continue
        threshold = MEMORY_NORMAL_BELOW if ("memory", index) in health.findings else MEMORY_HIGH_ABOVE
        # The program counts its own memory, the driver all of its process: the limit is for the latter.
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
    """Growth that lasts: the least among the thirds of a window, so that what is allocated once does not count."""
    third = max(2, len(held) // 3)
    parts = [held[begin : begin + third] for begin in range(0, len(held) - third + 1, third)]
    return max(0.0, min((part[-1] - part[0]) / (third - 1) for part in parts))


def _straggler_cost(health: RunHealth, stragglers: set[int]) -> dict[Finding, str]:
    """Whether the others would be faster by themselves: all wait for the slowest, who brings its own share too."""
    speeds = _speeds(health)
    kept = [speed for index, speed in enumerate(speeds) if index not in stragglers]
    if not stragglers or not kept:
        return {}
    now, then = len(speeds) * min(speeds), len(kept) * min(kept)
    finding: Finding = ("straggler", ALL_GMIS)
    if then < (NO_GAIN_BELOW if finding in health.findings else REPLAN_GAIN_ABOVE) * now:
        return {}
    whom, count = "it" if len(stragglers) == 1 else "them", len(kept)
    promise = f"{then:,.0f} steps/s of work by {count} instead of {now:,.0f} by {len(speeds)}"
    return {finding: f"leaving {whom} out pays, with {promise}"}


def _smaller_plan(health: RunHealth) -> tuple[int, int, str]:
    """GMIs and environments that need less memory, no GMIs where there is no such plan; and a sentence on it."""
    num_gmis, num_envs = len(health.gmis), health.num_envs
    if num_envs > 1:
        return num_gmis, num_envs // 2, f"Half as many environments need less: {num_envs // 2} for each GMI"
    if num_gmis > 1:
        return num_gmis - 1, num_envs, f"Fewer GMIs leave more to each: {num_gmis - 1}"
    return 0, 0, "One GMI with one environment cannot be made smaller: give it more memory"
