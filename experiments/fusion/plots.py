"""What the figures' drawings have in common."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes

COLOURS = {
    "gymnasium": "#7f7f7f",
    "gymnasium-vector": "#bcbd22",
    "envpool": "#8c564b",
    "torch": "#d62728",
    "torch.compile": "#ff7f0e",
    "xla": "#1f77b4",
    "warp": "#76b900",
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


def rate_table(rates: dict[tuple[str, int, int], float], unit: float, word: str) -> str:
    """Rates by (form, K, N): a row per form and K, a column per N."""
    sizes = sorted({num_envs for _, _, num_envs in rates})
    lines = [f"| form | {' | '.join(f'N = {n}' for n in sizes)} |", "|---" * (len(sizes) + 1) + "|"]
    for form, steps in dict.fromkeys((form, steps) for form, steps, _ in rates):
        cells = [f"{rates[form, steps, n] / unit:,.3g}" if (form, steps, n) in rates else "" for n in sizes]
        lines.append(f"| {form}, K = {steps} | {' | '.join(cells)} |")
    return f"{word} environment steps per second, medians:\n\n" + "\n".join(lines)
