"""Throughput and memory of every template, as in the paper's Figure 12, with the model's prediction as marks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.mapping.cases import BASELINE, TEMPLATES
from experiments.mapping.summary import Row

COLOURS = {"dp_only": "#3b6ea8", "dp_mp": "#c8553d", "mp_dp": "#8aa29e", "e_at": "#8aa29e", "ea_t": "#e9b44c"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """A column per kind of work; throughput above, memory below."""
    modes = [mode for mode in TEMPLATES if any(row.mode == mode for row in rows)]
    figure = Figure(figsize=(7 * len(modes), 7), layout="constrained")
    axes = figure.subplots(2, len(modes), squeeze=False)
    for column, mode in enumerate(modes):
        here = [row for row in rows if row.mode == mode]
        groups = list(dict.fromkeys((row.task, row.num_envs) for row in here))
        templates = list(dict.fromkeys(row.template for row in here))
        for place, template in enumerate(templates):
            own = {(row.task, row.num_envs): row for row in here if row.template == template}
            bars = [group for group in groups if group in own]
            at = [groups.index(group) + 0.8 * ((place + 0.5) / len(templates) - 0.5) for group in bars]
            _draw_template(
                axes[0][column], axes[1][column], at, [own[group] for group in bars], 0.75 / len(templates)
            )
        title = "training" if mode == "synchronous" else mode
        axes[0][column].set_title(f"{title}: steps/s over {BASELINE}'s (+: predicted)")
        axes[1][column].set_title(f"{title}: resident memory of all GMIs, MiB")
        for axis in axes[:, column]:
            axis.set_xticks(
                range(len(groups)), [f"{task}\n{num_envs} x simulators" for task, num_envs in groups]
            )
            axis.grid(axis="y", alpha=0.3)
        axes[0][column].axhline(1.0, color="black", linewidth=0.8)
        axes[0][column].legend()
    figure.savefig(path, dpi=110)


def _draw_template(speed: Any, memory: Any, at: list[float], rows: Sequence[Row], width: float) -> None:
    template = rows[0].template
    medians = [statistics.median(row.speed or (0.0,)) for row in rows]
    spread = [
        [median - min(row.speed or (median,)) for median, row in zip(medians, rows, strict=True)],
        [max(row.speed or (median,)) - median for median, row in zip(medians, rows, strict=True)],
    ]
    speed.bar(at, medians, width, yerr=spread, capsize=2, color=COLOURS[template], label=template)
    predicted = [(x, row.predicted_speed) for x, row in zip(at, rows, strict=True) if row.predicted_speed]
    speed.plot([x for x, _ in predicted], [value for _, value in predicted], "k+", markersize=9)
    memory.bar(at, [row.resident_bytes / 2**20 for row in rows], width, color=COLOURS[template])
