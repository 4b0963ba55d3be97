"""From rows to a headline in words and a figure: RL-Scope."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.papers.readings import bars, figure, save
from experiments.profiler import survey

Rows = Any


def draw_figure(number: int, rows: Rows, path: Path) -> None:
    """As the experiment itself draws it."""
    survey.draw(rows["rows"], number, path)


def frameworks(rows: Rows) -> str:
    """Simulation and Python by library."""
    parts = []
    for row in survey.chosen(rows["rows"], 4):
        python = sum(value for (_, level), value in survey.shares(row).items() if level == "python")
        parts.append(
            f"{row['library']} {row['algorithm']} {100 * survey.of_stage(row, 'simulation'):.0f} and {100 * python:.0f} %"
        )
    return f"simulation and Python: {', '.join(parts)}"


def algorithms(rows: Rows) -> str:
    """Shares of simulation, and how far on-policy is above off-policy."""
    return "; ".join(
        f"{library}: {_simulation(found)}, least on-policy over most off-policy {_bound(found):.1f}"
        for library in ("sb3", "rayagi")
        if (found := [row for row in survey.chosen(rows["rows"], 5) if row["library"] == library])
    )


def _simulation(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['algorithm']} {100 * survey.of_stage(row, 'simulation'):.1f} %" for row in rows)


def _bound(rows: Sequence[Mapping[str, Any]]) -> float:
    on, off = (
        [
            survey.of_stage(row, "simulation")
            for row in rows
            if (row["algorithm"] in survey.OFF_POLICY) == is_off
        ]
        for is_off in (False, True)
    )
    return min(on) / max(off)


def simulators(rows: Rows) -> str:
    """Shares of simulation by task."""
    parts = []
    for library in ("sb3", "rayagi"):
        found = [row for row in survey.chosen(rows["rows"], 7) if row["library"] == library]
        shares = {row["task"]: 100 * survey.of_stage(row, "simulation") for row in found}
        if shares:
            parts.append(f"{library} " + ", ".join(f"{task} {share:.0f} %" for task, share in shares.items()))
    return f"PPO, simulation: {'; '.join(parts)}"


def _hooks(rows: Rows) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for program in rows["programs"]:
        if "failed" not in program:
            for kind, ns in program["calibration"]["calibration"]["hooks"].items():
                found.setdefault(kind, []).append(ns)
    return found


def costs(rows: Rows) -> str:
    """Cost of an event of each kind of hook over the programs."""
    return ", ".join(
        f"{kind} {statistics.median(values):,.0f} ns ({min(values):,.0f}-{max(values):,.0f} of {len(values)} programs)"
        for kind, values in _hooks(rows).items()
    )


def draw_costs(rows: Rows, path: Path) -> None:
    """A bar for each kind of hook."""
    made, axes = figure("Cost of a recorded event, by program", "", "ns")
    bars(axes, _hooks(rows))
    save(made, path)


def bias(rows: Rows) -> str:
    """Largest error after the correction, and before it."""
    programs = [program for program in rows["programs"] if "failed" not in program]
    after, before = (max(abs(program[name]) for program in programs) for name in ("error", "overhead"))
    return f"within {100 * after:.1f} % on {len(programs)} programs; uncorrected {100 * before:.1f} % at most"


def draw_bias(rows: Rows, path: Path) -> None:
    """Recorded and corrected time over uninstrumented."""
    made, axes = figure("CPU time over uninstrumented: recorded (left), corrected (right)", "", "%")
    programs = [program for program in rows["programs"] if "failed" not in program]
    for place, program in enumerate(programs):
        axes.bar(place - 0.2, 100 * program["overhead"], 0.4, color="#ee6677")
        axes.bar(
            place + 0.2,
            100 * program["error"],
            0.4,
            color="#4477aa",
            yerr=100 * program["error_spread"],
            capsize=3,
        )
    axes.set_xticks(
        range(len(programs)),
        [program["program"] for program in programs],
        rotation=30,
        ha="right",
        fontsize=8,
    )
    axes.axhline(0, color="grey", linewidth=1)
    save(made, path)
