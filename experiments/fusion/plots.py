"""What the figures' drawings have in common."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.fusion.records import Measured

COLOURS = {
    "gymnasium": "#7f7f7f",
    "gymnasium-vector": "#bcbd22",
    "envpool": "#8c564b",
    "torch": "#d62728",
    "torch-gpu": "#d62728",
    "torch.compile": "#ff7f0e",
    "xla": "#1f77b4",
    "warp": "#76b900",
    "warp-gpu": "#76b900",
    "cuda": "#2f4f2f",
    "c": "#9467bd",
    "c, fused policy": "#4b0082",
}
STYLES = {1: "-", 10: "-.", 100: "--", 1000: ":"}
"""By steps per call."""


def middle(values: Iterable[dict[str, Any]], name: str) -> float:
    """Median over repeats."""
    return statistics.median(one[name] for one in values)


def extent(values: Iterable[dict[str, Any]], name: str) -> tuple[float, float]:
    """Lowest and highest over repeats."""
    found = [one[name] for one in values]
    return min(found), max(found)


def line(
    axes: Axes,
    points: Sequence[tuple[float, Sequence[dict[str, Any]]]],
    name: str,
    label: str,
    **style: Any,
) -> None:
    """Medians over repeats against x, with lowest and highest as a band."""
    ordered = sorted(points, key=lambda point: point[0])
    x = [place for place, _ in ordered]
    (drawn,) = axes.plot(x, [middle(values, name) for _, values in ordered], marker=".", label=label, **style)
    low, high = zip(*(extent(values, name) for _, values in ordered), strict=True)
    axes.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


def log_axes(axes: Axes, x: str, y: str) -> None:
    """Both logarithmic, x in powers of two as in the paper."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


def draw_rates(
    cases: Iterable[Measured],
    name_of: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]],
    title: str,
    path: Path,
) -> None:
    """Rates against N: by the clock, and by CPU time, which other programs on the machine change little.

    Args:
        cases: labels and the values of their repeats
        name_of: a line's label and style, from the case's labels
        title: of the figure
        path: of the PNG
    """
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    lines: dict[str, tuple[dict[str, Any], list[tuple[float, list[dict[str, Any]]]]]] = {}
    for labels, values in cases:
        label, style = name_of(labels)
        lines.setdefault(label, (style, []))[1].append((labels["num_envs"], values))
    for axes, rate, unit in ((left, "steps_per_s", "second"), (right, "steps_per_cpu_s", "CPU second")):
        for label, (style, points) in lines.items():
            line(axes, points, rate, label, **style)
        log_axes(axes, "environments N", f"environment steps per {unit}")
    left.legend(fontsize=7, ncols=2)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def form_and_steps(labels: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A colour per form, a style per K."""
    form, steps = labels["form"], labels["steps"]
    return f"{form}, K={steps}", {"color": COLOURS[form], "linestyle": STYLES[steps]}


def rate_table(cases: Iterable[Measured], unit: float, word: str) -> str:
    """Rates by form, K and N: a row per form and K, a column per N."""
    rates = {
        (labels["form"], labels["steps"], labels["num_envs"]): tuple(
            middle(values, rate) / unit for rate in ("steps_per_s", "steps_per_cpu_s")
        )
        for labels, values in cases
    }
    sizes = sorted({num_envs for _, _, num_envs in rates})
    lines = [f"| form | {' | '.join(f'N = {n}' for n in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for form, steps in dict.fromkeys((form, steps) for form, steps, _ in rates):
        found = [rates.get((form, steps, n)) for n in sizes]
        cells = ["" if one is None else ", ".join(map(_figures, one)) for one in found]
        lines.append(f"| {form}, K = {steps} | {' | '.join(cells)} |")
    return f"{word} environment steps per second, and per CPU second; medians:\n\n" + "\n".join(lines)


def _figures(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
