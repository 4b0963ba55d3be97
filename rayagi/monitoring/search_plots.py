"""Plots of a search as in the paper: throughput and saturation (Figure 13), projected and measured memory (Figure 14)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from placement.errors import counted
from placement.search import SATURATION, Trial, TrialMeasurement, project_memory
from rayagi.monitoring.plots import save_figure

_LOWEST, _HIGHEST = -2.0, 10.0
"""Values of Sat at the ends of its axis: it is infinite where memory did not grow."""
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def save_search_plots(trials: Sequence[Trial], memory_bytes: int, folder: Path, title: str) -> list[Path]:
    """Draw saturation.png and memory.png into ``folder``; returns their paths.

    Args:
        trials: as they were made
        memory_bytes: of one device, which its GMIs share
        folder: an existing folder
        title: what was searched

    Raises:
        DiskError: a plot cannot be written; its old content stays.
    """
    paths = []
    for name, draw in (("saturation.png", _draw_saturation), ("memory.png", _draw_memory)):
        figure = Figure(figsize=(8, 4.2), layout="constrained")
        figure.suptitle(title)
        draw(figure, _by_gmis(trials), memory_bytes)
        save_figure(figure, folder / name)
        paths.append(folder / name)
    return paths


def _by_gmis(trials: Sequence[Trial]) -> dict[int, list[Trial]]:
    groups: dict[int, dict[int, Trial]] = {}
    for trial in trials:
        if isinstance(trial.outcome, TrialMeasurement) and trial.verdict not in ("compared", "again"):
            # The row's own trial after that of the coarse pass.
            groups.setdefault(trial.gmis_per_gpu, {})[trial.num_envs] = trial
    return {gmis: [row[envs] for envs in sorted(row)] for gmis, row in groups.items()}


def _draw_saturation(figure: Figure, groups: dict[int, list[Trial]], memory_bytes: int) -> None:
    """Throughput of all GMIs above, Sat below; one line per number of GMIs. Triangles are values beyond Sat's axis."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for (gmis, trials), colour in zip(groups.items(), cycle(_COLOURS), strict=False):
        envs = [trial.num_envs for trial in trials]
        speeds = [trial.system_steps_per_s or _measured(trial).steps_per_s * gmis for trial in trials]
        errors = [
            speed * _measured(trial).relative_error for speed, trial in zip(speeds, trials, strict=True)
        ]
        above.errorbar(
            envs, speeds, yerr=errors, marker="o", capsize=2, color=colour, label=counted(gmis, "GMI")
        )
        later = [trial for trial in trials if trial.saturation is not None]
        values = {trial.num_envs: trial.saturation or 0.0 for trial in later}
        shown = [max(_LOWEST, min(_HIGHEST, value)) for value in values.values()]
        below.plot(list(values), shown, marker="o", color=colour)
        for marker, end, beyond in (
            ("^", _HIGHEST, [count for count, value in values.items() if value > _HIGHEST]),
            ("v", _LOWEST, [count for count, value in values.items() if value < _LOWEST]),
        ):
            below.plot(
                beyond, [end] * len(beyond), marker, markersize=10, color=colour, markerfacecolor="white"
            )
    below.axhline(SATURATION, color="#222222", linewidth=0.8, linestyle="--")
    above.set_ylabel("steps per second")
    above.set_ylim(bottom=0)
    above.legend(fontsize=8)
    below.set_ylabel("Sat (triangles: beyond)")
    _finish(below)
    above.grid(visible=True, alpha=0.3)


def _draw_memory(figure: Figure, groups: dict[int, list[Trial]], memory_bytes: int) -> None:
    """Memory of one GMI: measured, and projected by eq. 4 from the two trials before."""
    axis = figure.subplots()
    for (gmis, trials), colour in zip(groups.items(), cycle(_COLOURS), strict=False):
        envs = [trial.num_envs for trial in trials]
        held = [_measured(trial).memory_bytes / 2**20 for trial in trials]
        axis.plot(envs, held, marker="o", color=colour, label=f"{counted(gmis, 'GMI')}, measured")
        before = [(trial.num_envs, _measured(trial)) for trial in trials]
        projected = [
            (count, project_memory(before[:index], count)) for index, count in enumerate(envs) if index >= 2
        ]
        if projected:
            axis.plot(
                [count for count, _ in projected],
                [(value or 0.0) / 2**20 for _, value in projected],
                marker="x",
                linestyle="--",
                color=colour,
                label=f"{counted(gmis, 'GMI')}, projected (limit {memory_bytes / gmis / 2**20:,.0f} MiB)",
            )
    axis.set_ylabel("MiB of one GMI")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    _finish(axis)


def _measured(trial: Trial) -> TrialMeasurement:
    assert isinstance(trial.outcome, TrialMeasurement)
    return trial.outcome


def _finish(axis: Any) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xlabel("environments of one GMI")
    axis.grid(visible=True, alpha=0.3)
