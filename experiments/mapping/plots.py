"""Predicted against measured throughput of every case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.mapping.summary import Line, rows_of

COLOURS = {
    "dp_only": "#3b6ea8",
    "dp_mp": "#c8553d",
    "mp_dp": "#8aa29e",
    "e_at": "#5f7f3a",
    "ea_t": "#e9b44c",
    "decoupled": "#7d5ba6",
}


def draw(lines: Sequence[Line], path: Path) -> None:
    """A panel per kind of work; on the diagonal the model is exact."""
    rows = rows_of(lines)
    groups = list(dict.fromkeys(row.group for row in rows))
    figure = Figure(figsize=(4.5 * len(groups), 4.5), layout="constrained")
    for axis, group in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups, strict=True):
        here = [row for row in rows if row.group == group]
        for template in dict.fromkeys(row.name.split()[0] for row in here):
            own = [row for row in here if row.name.split()[0] == template]
            measured = [row.median for row in own]
            axis.plot(measured, [row.predicted for row in own], "o", color=COLOURS[template], label=template)
        ends = [bound(value for row in here for value in (row.median, row.predicted)) for bound in (min, max)]
        axis.plot(ends, ends, color="black", linewidth=0.8)
        axis.set(title=group, xlabel="measured steps/s", ylabel="predicted", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
