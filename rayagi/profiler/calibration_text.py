"""Calibrations, corrections and validations as text for a terminal."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from statistics import mean

from collectives.errors import counted
from rayagi.profiler.calibration import PROCESS
from rayagi.profiler.calibration_store import Recorded, StoredCalibration, other_file
from rayagi.profiler.measurement import LARGEST_COSTS_NS, SMALLEST_SHARE, Validation
from rayagi.profiler.overlap import Breakdown
from rayagi.profiler.summary import aligned, seconds
from rayagi.profiler.trace import printable


def costs_text(found: StoredCalibration) -> list[str]:
    """A table of costs by kind of hook. What is smaller than its standard error is noise."""
    costs = found.calibration
    rows = [["event", "cost", "standard error", "events of a run", "together"]]
    counts = {kind: count for kind, count in found.counts.items() if kind != PROCESS or kind in costs.hooks}
    for kind, count in sorted(counts.items()):
        if kind in costs.hooks:
            cost = costs.hooks[kind]
            error = seconds(costs.errors[kind]) if kind in costs.errors else "-"
            rows.append([_event_name(kind), seconds(cost), error, f"{count:,}", seconds(cost * count)])
        else:
            rows.append([_event_name(kind), "not measured", "-", f"{count:,}", "-"])
    rows += [[f"{name}, within it", seconds(cost), "-", "-", "-"] for name, cost in costs.functions.items()]
    note = (
        f"CPU time; {found.rounds} rounds, whose uninstrumented times spread over {100 * costs.spread:.1f} %. "
        "What is not measured has too few events to matter."
    )
    return [*aligned(rows, left=1), note]


def _event_name(kind: str) -> str:
    return "start of a process" if kind == PROCESS else kind


def calibration_line(used: StoredCalibration) -> str:
    """Which calibration, how old, and its costs."""
    costs = ", ".join(
        f"{_event_name(kind)} {seconds(ns)}"
        + (
            f" \N{PLUS-MINUS SIGN} {seconds(used.calibration.errors[kind])}"
            if kind in used.calibration.errors
            else ""
        )
        for kind, ns in sorted(used.calibration.hooks.items())
    )
    when = datetime.fromtimestamp(used.unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = printable(" ".join(used.command)[:100])
    return f"Calibration of {when} ({age(time.time() - used.unix_s)} old), of `{command}`: {costs}."


def age(elapsed_s: float) -> str:
    """``3 hours``."""
    for length_s, unit in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if (count := int(elapsed_s // length_s)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


def correction_text(
    found: Breakdown, used: StoredCalibration | None, recorded: Recorded | None = None
) -> str:
    """What was removed of a profile, and by which calibration, which may be of another file than what was recorded."""
    if used is None:
        return "Times include the profiler's own."
    whole = found.removed_ns + sum(found.totals.get("", {}).values())
    share = f" ({100 * found.removed_ns / whole:.1f} %)" if whole else ""
    removed = f"{seconds(found.removed_ns)}{share} removed"
    rest = [
        f"{kind}, {counted(count, 'event')}"
        for kind, count in sorted(found.uncorrected.items())
        if count * LARGEST_COSTS_NS[kind] >= SMALLEST_SHARE * whole
    ]
    if rest:
        text = f"Times include a part of the profiler's own: {removed}, but not measured: {'; '.join(rest)}."
    else:
        text = f"Without the profiler's own time: {removed}."
    other = other_file(used, recorded) if recorded is not None else ""
    return " ".join(filter(None, [text, calibration_line(used), other and f"But {other}."]))


def validation_text(found: Validation) -> list[str]:
    """A table of CPU times: uninstrumented, instrumented, corrected."""
    plain = mean(found.uninstrumented)

    def row(name: str, times: tuple[float, ...], error: str = "") -> list[str]:
        change = f"{100 * (mean(times) / plain - 1):+.1f} %"
        return [name, seconds(mean(times)), "" if times is found.uninstrumented else change, error]

    spread = f"\N{PLUS-MINUS SIGN} {100 * found.error_spread:.1f} %"
    rows = [
        ["runs", "CPU time", "difference", "spread"],
        row("uninstrumented", found.uninstrumented, f"\N{PLUS-MINUS SIGN} {100 * found.spread:.1f} %"),
        row("instrumented", found.instrumented),
        row("corrected", found.corrected, spread),
    ]
    number = len(found.uninstrumented)
    how = "iterations took turns in one process" if found.in_turns else "runs of the whole program"
    note = f"Means of {number} repetitions, {how}. Spread: of one repetition, the standard deviation."
    return [*aligned(rows, left=1), note]
