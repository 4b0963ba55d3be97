"""Figures 5 and 6: where the time of data collection goes as a call takes more steps, and calls and kernels that it takes.

The paper measured its GPU with RL-Scope. Here three parts are told apart by measuring, at each K:

    Python    the same loop with the compiled program replaced by something that returns at once
    backend   the same program for one environment, less Python: dispatch, and starting kernels
    device    the rest: what the other environments add

All in CPU time of all threads: by the clock, a long call is interrupted by others' work and a short one is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.fusion.collection import collector
from experiments.fusion.figure import Case, Measure, Size
from experiments.fusion.plots import COLOURS, middle
from experiments.fusion.records import Records
from experiments.fusion.timing import cost

NUM_ENVS = 4096
COUNTED = ("torch", "torch.compile", "xla", "c, fused policy")
PARTS = ("python", "backend", "device")


def time_groups(size: Size) -> Iterator[Sequence[Case]]:
    """Figure 5: one per K."""
    for steps in (1, 100) if size.quick else (1, 10, 100, 1000):
        yield [Case({"form": "xla", "num_envs": NUM_ENVS, "steps": steps}, lambda k=steps: _parts(k, size))]


def count_groups(size: Size) -> Iterator[Sequence[Case]]:
    """Figure 6: one per form and K. Counting has no spread."""
    for form in COUNTED:
        for steps in (1, 100) if size.quick else (1, 10, 100, 1000):
            labels = {"form": form, "num_envs": NUM_ENVS, "steps": steps}
            yield [Case(labels, lambda f=form, k=steps: _counts(f, k, size))]


def _parts(steps: int, size: Size) -> Measure:
    whole, one = (collector("xla", num_envs, steps, size.threads) for num_envs in (NUM_ENVS, 1))
    idle: Any = collector("xla", 1, steps, size.threads)
    idle.collect()
    result = (idle._worlds, idle._key, idle._rows)
    idle.compiled = lambda *_: result

    def once() -> dict[str, float]:
        python = cost(idle.collect, lambda: None, size.seconds / 10).cpu
        overhead = cost(one.collect, one.wait, size.seconds).cpu
        everything = cost(whole.collect, whole.wait, size.seconds).cpu
        parts = {"python": python, "backend": overhead - python, "device": everything - overhead}
        return {name: part / steps for name, part in parts.items()}

    return once


def _counts(form: str, steps: int, size: Size) -> Measure:
    loop = collector(form, NUM_ENVS, steps, size.threads)

    def once() -> dict[str, float]:
        found = loop.counts()
        return {"api_calls": float(found.api_calls), "launches": float(found.launches)}

    return once


def draw_time(records: Records, path: Path) -> None:
    """Seconds of a step of all environments, stacked, and shares."""
    cases = sorted(records.of("5"), key=lambda case: case[0]["steps"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [str(labels["steps"]) for labels, _ in cases]
    heights = {part: [max(0.0, middle(values, part)) for _, values in cases] for part in PARTS}
    totals = [sum(column) for column in zip(*heights.values(), strict=True)]
    for axes, scale in ((left, [1e6] * len(totals)), (right, [100 / total for total in totals])):
        bottom = [0.0] * len(names)
        for part, colour in zip(PARTS, ("#d62728", "#ff7f0e", "#1f77b4"), strict=True):
            drawn = [height * factor for height, factor in zip(heights[part], scale, strict=True)]
            axes.bar(names, drawn, bottom=bottom, label=part, color=colour)
            bottom = [low + high for low, high in zip(bottom, drawn, strict=True)]
        axes.set_xlabel("steps per call K")
    left.set_ylabel(f"CPU microseconds of a step of {NUM_ENVS} environments")
    right.set_ylabel("%")
    left.legend()
    figure.suptitle("Figure 5: where XLA's data collection spends its time")
    figure.savefig(path, dpi=110)


def draw_counts(records: Records, path: Path) -> None:
    """Calls and kernels against K."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    grid = figure.subplots(1, 2, sharey=True)
    for axes, name, title in zip(
        grid, ("api_calls", "launches"), ("calls from Python to the backend", "kernels"), strict=True
    ):
        for form in COUNTED:
            own = [case for case in records.of("6") if case[0]["form"] == form]
            points = sorted((labels["steps"], middle(values, name)) for labels, values in own)
            axes.plot(*zip(*points, strict=True), marker=".", label=form, color=COLOURS[form])
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("steps K")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    grid[0].legend()
    figure.suptitle("Figure 6: what K steps of data collection take")
    figure.savefig(path, dpi=110)


def time_findings(records: Records) -> str:
    """Medians and shares."""
    lines = [
        "| K | Python, CPU us a step | backend | device | Python and backend, share |",
        "|---|---|---|---|---|",
    ]
    for labels, values in sorted(records.of("5"), key=lambda case: case[0]["steps"]):
        parts = [middle(values, part) for part in PARTS]
        cells = " | ".join(f"{1e6 * part:,.1f}" for part in parts)
        lines.append(f"| {labels['steps']} | {cells} | {100 * (parts[0] + parts[1]) / sum(parts):.0f} % |")
    return "\n".join(lines)


def count_findings(records: Records) -> str:
    """Every count."""
    lines = ["| form | K | calls | kernels |", "|---|---|---|---|"]
    for labels, values in records.of("6"):
        row = (
            labels["form"],
            labels["steps"],
            *(f"{middle(values, name):,.0f}" for name in ("api_calls", "launches")),
        )
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)
