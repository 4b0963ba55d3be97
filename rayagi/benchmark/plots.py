"""Plot of cost models against measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rayagi.benchmark.results import ResultRow
from rayagi.monitoring.plots import save_figure

_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_TOLERANCE = 0.2
"""The planner's tolerance (``collectives.planner.TOLERANCE``)."""


def save_plot(rows: Sequence[ResultRow], path: Path) -> None:
    """Draw a panel per layout, and one panel of all errors; there is at least one row.

    Raises:
        DiskError: it cannot be written; the old content stays.
    """
    layouts = list(dict.fromkeys(row.layout for row in rows))
    compositions = list(dict.fromkeys(row.composition for row in rows))
    colours = dict(zip(compositions, cycle(_COLOURS), strict=False))
    figure = Figure(figsize=(4.2 * (len(layouts) + 1) + 1.6, 4.2), layout="constrained")
    *panels, last = figure.subplots(1, len(layouts) + 1)
    for panel, layout in zip(panels, layouts, strict=True):
        _draw_layout(panel, [row for row in rows if row.layout == layout], colours)
        panel.set_title(layout)
    _draw_errors(last, rows, colours)
    figure.legend(handles=_legend(last, colours), loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def _draw_layout(axis: Any, rows: Sequence[ResultRow], colours: dict[str, str]) -> None:
    """Time against bytes: measured with its spread, the alpha-beta model as a line, the paper's projection dashed.

    What a model lacks is None, of which numpy makes NaN.
    """
    for name, colour in colours.items():
        own = sorted((row for row in rows if row.composition == name), key=lambda row: row.nbytes)
        if not own:
            continue
        sizes = np.array([row.nbytes for row in own]) / 1e6
        low, median, high = np.array([(row.p10_s, row.median_s, row.p90_s) for row in own]).T
        spread = np.array([median - low, high - median])
        axis.errorbar(sizes, 1e3 * median, 1e3 * spread, fmt="o", markersize=4, color=colour)
        axis.plot(sizes, 1e3 * np.array([row.model_s for row in own], float), color=colour, linewidth=1)
        paper_ms = 1e3 * np.array([row.paper_s for row in own], float)
        axis.plot(sizes, paper_ms, color=colour, linewidth=1, linestyle=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = sorted({row.nbytes / 1e6 for row in rows})
    axis.set_xticks(ticks, [f"{megabytes:g}" for megabytes in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("MB")
    axis.set_ylabel("ms per all-reduce")
    axis.grid(visible=True, alpha=0.3)


def _draw_errors(axis: Any, rows: Sequence[ResultRow], colours: dict[str, str]) -> None:
    """Measured against projected, with the planner's tolerance band."""
    for row in rows:
        colour, measured_ms = colours[row.composition], 1e3 * row.median_s
        for projected_s, marker, face in ((row.model_s, "o", colour), (row.paper_s, "s", "none")):
            if projected_s is not None:
                axis.plot(
                    1e3 * projected_s, measured_ms, marker, markersize=4, color=colour, markerfacecolor=face
                )
    ends = 1e3 * np.array([(row.median_s, row.model_s, row.paper_s) for row in rows], float)
    line = np.array([np.nanmin(ends) / 2, np.nanmax(ends) * 2])
    axis.plot(line, line, color="#000000", linewidth=0.8)
    axis.fill_between(line, line * (1 - _TOLERANCE), line * (1 + _TOLERANCE), color="#000000", alpha=0.1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(f"error; within {_TOLERANCE:.0%} is grey")
    axis.set_xlabel("projected ms")
    axis.set_ylabel("measured ms")
    axis.grid(visible=True, alpha=0.3)


def _legend(axis: Any, colours: dict[str, str]) -> list[Any]:
    """Legend entries for colours and lines, as empty plots."""
    entries = [axis.plot([], [], "o", color=colour, label=name)[0] for name, colour in colours.items()]
    black = {"color": "#000000", "markersize": 4}
    entries.append(axis.plot([], [], "-o", label="alpha-beta model", linewidth=1, **black)[0])
    entries.append(
        axis.plot([], [], ":s", label="paper's projection", linewidth=1, markerfacecolor="none", **black)[0]
    )
    return entries
