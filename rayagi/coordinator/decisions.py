"""Replanning decisions: maps a run's health to nothing, a proposal, or a new plan at the next checkpoint. Pure functions.

A GMI's speed excludes its waiting time, since GMIs that train together all advance at the pace of the slowest; so does the
prediction that it is compared with. Speeds are medians over a window, so a few slow iterations change nothing. A finding is
cleared at another threshold than it is raised at (hysteresis), so values near a threshold do not toggle it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from placement.backends.base import SliceHealth
from placement.errors import counted

SLOW_BELOW, NORMAL_ABOVE = 0.8, 0.9
"""Fractions of the expected speed: a finding is raised below the first and cleared above the second."""
MEMORY_HIGH_ABOVE, MEMORY_NORMAL_BELOW = 0.9, 0.8
"""Fractions of the memory limit: a finding is raised above the first and cleared below the second."""
REPLAN_GAIN_ABOVE, NO_GAIN_BELOW = 1.05, 1.0
"""Speedup without slow GMIs: a finding is raised above the first, since a new plan restarts all GMIs, and cleared below the
second."""
QUEUE_ABOVE = 0.1
"""Share of its time for which a GMI waits for a core, from which on that is named as a cause."""
QUIET_WINDOWS = 10
"""Number of windows without a finding about speed, after which it is reported again."""
HORIZON_WINDOWS = 10
"""Number of windows for which memory growth is extrapolated."""

Finding = tuple[Literal["slow", "memory", "straggler", "share"], int]
"""(kind, GMI). (slow, ALL_GMIS): the whole run is slower than predicted. (straggler, ALL_GMIS): the run would be faster
without slow GMIs. share: the GMI's share of a GPU is degraded or lost."""
ALL_GMIS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiHealth:
    """Measurements of one GMI over the last iterations, oldest first."""

    steps_per_s: tuple[float, ...]
    """Environment steps per second of its own work, without waiting. Empty without a simulator: its speed is not judged."""
    planned_steps_per_s: float | None = None
    """Predicted steps per second of its own work; None without a prediction."""
    memory_bytes: tuple[float, ...] = ()
    """Empty: not measured."""
    memory_limit_bytes: int = 0
    driver_bytes: int | None = None
    """GPU memory of its process by the driver's count, including CUDA's own; None: not reported."""
    share: SliceHealth | None = None
    """Health of its slice; None without a partition."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Median seconds of an iteration in each phase of its own work, as ``simulate``. Empty: not measured."""
    queue_share: float = 0.0
    """Share of its time in which its thread could have run, but others were on its cores."""
    major_faults: float = 0.0
    """Pages from disk, mean of an iteration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHealth:
    """Input of a decision."""

    gmis: tuple[GmiHealth, ...]
    num_envs: int
    """Environments of one GMI."""
    fewer_envs: int
    """Environments of one GMI in a plan with at most half as many; 0: the run's settings allow none."""
    window: int
    """Iterations that are needed for a decision."""
    may_replan: bool = False
    findings: frozenset[Finding] = frozenset()
    """Active findings of earlier decisions."""
    recent: frozenset[Finding] = frozenset()
    """Findings about speed that were active in the last ``QUIET_WINDOWS`` windows: reported already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do, with the reason in numbers."""

    action: Literal["nothing", "propose", "replan"]
    findings: frozenset[Finding]
    """Active findings, the input of the next decision."""
    reason: str = ""
    left_out: tuple[int, ...] = ()
    """GMIs that the proposed plan leaves out; the others keep their slices."""
    num_envs: int = 0
    """Environments of one GMI in the proposed plan; 0 if there is no better plan."""


def decide(health: RunHealth) -> Decision:
    """Decide from the last window. Only new findings lead to an action, so each is reported once.

    On a busy machine GMIs become slow and normal by turns: one that was slow not long ago is not reported again.
    """
    recorded = {index: gmi.steps_per_s for index, gmi in enumerate(health.gmis) if gmi.steps_per_s}
    if not recorded or any(len(values) < health.window for values in recorded.values()):
        return Decision(action="nothing", findings=health.findings)
    speeds = {index: median(values[-health.window :]) for index, values in recorded.items()}
    # 1. Collect the active findings. 2. Report the new ones. 3. Propose a plan: less memory first, then no stragglers.
    slow, memory = _slow(health, speeds), _low_memory(health)
    stragglers, cost = _stragglers(health, speeds, {index for _, index in slow} - {ALL_GMIS})
    found = memory | slow | cost | _unhealthy_shares(health)
    findings = frozenset(found)
    new = findings - health.findings - health.recent
    if not new:
        return Decision(action="nothing", findings=findings)
    reasons = [text for finding, text in found.items() if finding in new]
    left_out, num_envs, outlook = stragglers, health.num_envs if stragglers else 0, ""
    if any(kind == "memory" for kind, _ in new):
        left_out, num_envs, outlook = _smaller_plan(health, speeds, memory)
    elif not stragglers and any(kind == "slow" for kind, _ in new):
        outlook = "No other number of GMIs is expected to be faster: check what else runs on the machine"
    return Decision(
        action="replan" if health.may_replan and num_envs else "propose",
        findings=findings,
        reason="; ".join(reasons) + (f". {outlook}" if outlook else ""),
        left_out=left_out,
        num_envs=num_envs,
    )


def _slow(health: RunHealth, speeds: Mapping[int, float]) -> dict[Finding, str]:
    """GMIs that are slower than the median of the others, or than predicted.

    If all that keep up with the others are slower than predicted, that is one finding of the run.
    """
    found: dict[Finding, str] = {}
    for index, speed in speeds.items():
        others = [other for position, other in speeds.items() if position != index]
        if others and _is_slow(speed, median(others), active=("slow", index) in health.findings):
            found["slow", index] = (
                f"GMI {index} runs at {speed:,.0f} steps/s of its own work, the others at {median(others):,.0f}"
                + _causes(health, [index], [other for other in speeds if other != index])
            )
    even = {index: speed for index, speed in speeds.items() if ("slow", index) not in found}
    late: dict[int, float] = {}
    for index, speed in even.items():
        planned = health.gmis[index].planned_steps_per_s
        active = bool({("slow", index), ("slow", ALL_GMIS)} & health.findings)
        if planned is not None and _is_slow(speed, planned, active=active):
            late[index] = planned
    if late and late.keys() == even.keys():
        found["slow", ALL_GMIS] = (
            f"GMIs run at {median(even.values()):,.0f} steps/s of their own work, "
            f"{median(late.values()):,.0f} were predicted" + _causes(health, list(even), [])
        )
        return found
    for index, planned in late.items():
        found["slow", index] = (
            f"GMI {index} runs at {speeds[index]:,.0f} steps/s of its own work, {planned:,.0f} were predicted"
            + _causes(health, [index], [other for other in speeds if other != index])
        )
    return found


def _causes(health: RunHealth, slow: Sequence[int], others: Sequence[int]) -> str:
    """What makes these GMIs slower than the others, in brackets; empty if nothing was measured that stands out.

    1. the phase that takes most of the additional time 2. others on their cores 3. pages from disk
    """
    own, rest = ([health.gmis[index] for index in some] for some in (slow, others))
    causes = []
    # 1. Only phases that all of them have: roles differ.
    common = set.intersection(*(set(gmi.phases_s) for gmi in [*own, *rest])) if rest else set[str]()
    more_s = {
        name: median(gmi.phases_s[name] for gmi in own) - median(gmi.phases_s[name] for gmi in rest)
        for name in sorted(common)
    }
    whole_s = sum(max(0.0, each) for each in more_s.values())
    if whole_s > 0:
        name = max(more_s, key=lambda each: more_s[each])
        causes.append(
            f"{more_s[name] / whole_s:.0%} of the difference is in {name}, {1e3 * more_s[name]:,.3g} ms more an iteration"
        )
    # 2. and 3.
    queue = median(gmi.queue_share for gmi in own)
    if queue >= QUEUE_ABOVE and queue >= 2 * median([gmi.queue_share for gmi in rest] or [0.0]):
        causes.append(f"{queue:.0%} of its time others were on its cores")
    faults = median(gmi.major_faults for gmi in own)
    if faults >= 1:
        causes.append(f"it waits for {faults:,.0f} pages from disk an iteration: memory is short")
    return f" ({'; '.join(causes)})" if causes else ""


def _is_slow(speed: float, expected: float, *, active: bool) -> bool:
    return speed <= NORMAL_ABOVE * expected if active else speed < SLOW_BELOW * expected


def _unhealthy_shares(health: RunHealth) -> dict[Finding, str]:
    """GMIs whose share is degraded or lost. A lost share also raises SliceLostError in the session, which recovers."""
    return {
        ("share", index): f"GMI {index}: {gmi.share.text}"
        for index, gmi in enumerate(health.gmis)
        if gmi.share is not None and gmi.share.state != "ok"
    }


def _low_memory(health: RunHealth) -> dict[Finding, str]:
    """GMIs that are near their memory limit, or grow towards it."""
    found: dict[Finding, str] = {}
    for index, gmi in enumerate(health.gmis):
        held, limit = gmi.memory_bytes[-health.window :], gmi.memory_limit_bytes
        if (len(held) < health.window and gmi.driver_bytes is None) or limit <= 0:
            continue
        active = ("memory", index) in health.findings
        # The program counts its own memory, the driver that of the whole process. The limit applies to the latter.
        now = max(median(held[-3:] or (0,)), gmi.driver_bytes or 0)
        growth = growth_per_iteration(held) if len(held) >= health.window else 0.0
        ahead = HORIZON_WINDOWS * health.window
        text = f"GMI {index} holds {now / 2**20:,.0f} MiB of {limit / 2**20:,.0f}"
        if _is_high(now / limit, active=active):
            found["memory", index] = text
        elif _is_high((now + growth * ahead) / limit, active=active):
            found["memory", index] = (
                f"{text} and grows by {growth / 2**20:,.2f} MiB an iteration: "
                f"the limit is {(limit - now) / growth:,.0f} iterations away"
            )
    return found


def _is_high(share: float, *, active: bool) -> bool:
    return share >= MEMORY_NORMAL_BELOW if active else share > MEMORY_HIGH_ABOVE


def growth_per_iteration(held: Sequence[float]) -> float:
    """Sustained growth: the smallest slope among the thirds of a window, so a single allocation does not count."""
    third = max(2, len(held) // 3)
    parts = [held[begin : begin + third] for begin in range(0, len(held) - third + 1, third)]
    return max(0.0, min((part[-1] - part[0]) / (third - 1) for part in parts))


def _stragglers(
    health: RunHealth, speeds: Mapping[int, float], slow: set[int]
) -> tuple[tuple[int, ...], dict[Finding, str]]:
    """The slow GMIs without which the run is fastest, and the finding; nothing if it gains too little.

    n synchronous GMIs do n * min(speeds) steps per second; without the k slowest, (n - k) * min(other speeds).
    """
    slowest_first = sorted(slow, key=lambda index: speeds[index])
    now, then, stragglers = len(speeds) * min(speeds.values()), 0.0, list[int]()
    for count in range(1, len(slowest_first) + 1):
        kept = [speed for index, speed in speeds.items() if index not in slowest_first[:count]]
        if kept and len(kept) * min(kept) > then:
            then, stragglers = len(kept) * min(kept), sorted(slowest_first[:count])
    finding: Finding = ("straggler", ALL_GMIS)
    active = finding in health.findings
    if not stragglers or not (then >= NO_GAIN_BELOW * now if active else then > REPLAN_GAIN_ABOVE * now):
        return (), {}
    text = (
        f"without {' and '.join(f'GMI {index}' for index in stragglers)} the run is faster, {then:,.0f} steps/s of own "
        f"work with {len(speeds) - len(stragglers)} instead of {now:,.0f} with {len(speeds)}"
    )
    return tuple(stragglers), {finding: text}


def _smaller_plan(
    health: RunHealth, speeds: Mapping[int, float], memory: Mapping[Finding, str]
) -> tuple[tuple[int, ...], int, str]:
    """(GMIs to leave out, environments of one GMI, explanation) of a plan that needs less memory; 0 environments if there
    is none."""
    num_envs, fewer = health.num_envs, health.fewer_envs
    if fewer:
        how = "Half as many" if 2 * fewer == num_envs else "Fewer"
        return (), fewer, f"{how} environments need less: {fewer} for each GMI"
    if len(speeds) > 1:
        short = next((index for _, index in memory if index in speeds), max(speeds))
        return (short,), num_envs, f"Fewer GMIs need less: {len(speeds) - 1}"
    return (
        (),
        0,
        f"One GMI with {counted(num_envs, 'environment')} cannot be made smaller: give it more memory",
    )
