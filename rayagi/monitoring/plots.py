"""Plots of a run from its CSV rows: learning curve, throughput, time split."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from rayagi.run.atomic import replace_bytes
from rayagi.run.csv_log import Row

_TIME_PARTS = (
    ("simulate_s", "simulate", "#4477aa"),
    ("act_s", "act", "#66ccee"),
    ("update_s", "update", "#228833"),
    ("sync_s", "synchronise", "#ee6677"),
    ("wait_s", "wait for experience", "#ccbb44"),
    ("exchange_s", "exchange steps", "#aa3377"),
    ("other_s", "other", "#bbbbbb"),
)
_ONE_CALL = (("simulate_s", "simulate and act, in one call", "#4477aa"), *_TIME_PARTS[2:])
"""The parts of runs whose rollouts are one compiled call each: ``act_s`` is 0, as it is inside ``simulate_s``."""
_MOST_POINTS = 2000


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """One column as float64, NaN where a cell is empty. Shape (len(rows),)."""
    return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)


def time_parts(rows: Sequence[Row]) -> tuple[tuple[str, str, str], ...]:
    """Parts of the iterations' wall time: column, label, colour; ``exchange_s`` only if GMIs exchange steps."""
    named = _TIME_PARTS if any(row.get("act_s") for row in rows) else _ONE_CALL
    return tuple(
        part for part in named if part[0] != "exchange_s" or any("exchange_s" in row for row in rows)
    )


def time_shares(rows: Sequence[Row]) -> dict[str, float]:
    """Share of the iterations' wall time that each of ``time_parts`` took, mean over GMIs; adds up to 1.

    ``other`` is the wall time of the slowest GMI minus the mean of the parts. If GMIs with different roles overlap, the
    parts may exceed the wall time; shares are then relative to their sum.
    """
    wall_s, named = float(np.nansum(column(rows, "iteration_s"))), time_parts(rows)
    if wall_s <= 0:
        return {label: 0.0 for _, label, _ in named}
    parts = {
        label: float(np.nansum(column(rows, name))) / wall_s for name, label, _ in named if name != "other_s"
    }
    whole = max(1.0, sum(parts.values()))
    return {label: part / whole for label, part in parts.items()} | {
        "other": 1.0 - sum(parts.values()) / whole
    }


def save_plots(progress: Sequence[Row], evaluations: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Draw learning_curve.png, throughput.png and time_split.png into ``folder``; returns their paths.

    ``progress`` has at least one row.

    Raises:
        DiskError: a plot cannot be written; its old content stays.
    """
    rows = progress[:: -(-len(progress) // _MOST_POINTS)]
    drawings: tuple[tuple[str, Callable[[Figure], None]], ...] = (
        ("learning_curve.png", lambda figure: draw_learning_curve(figure, rows, evaluations, title)),
        ("throughput.png", lambda figure: draw_throughput(figure, rows, title)),
        ("time_split.png", lambda figure: draw_time_split(figure, rows, title)),
    )
    paths = []
    for name, draw in drawings:
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        draw(figure)
        path = folder / name
        save_figure(figure, path)
        paths.append(path)
    return paths


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically.

    Raises:
        DiskError: it cannot be written; the old content stays.
    """
    content = io.BytesIO()
    software = {"Software": f"matplotlib {matplotlib.__version__}"}
    figure.savefig(content, format="png", dpi=120, metadata=software)
    replace_bytes(path, content.getvalue())


def draw_learning_curve(figure: Figure, rows: Sequence[Row], evaluations: Sequence[Row], title: str) -> None:
    """Training return and evaluations, against environment steps (iterations if there are none) and training time."""
    axes = figure.subplots(1, 2, sharey=True)
    figure.suptitle(title)
    simulates = _simulates(rows)
    for axis, name, label, scale in (
        (axes[0], "env_steps_total", "environment steps", 1.0)
        if simulates
        else (axes[0], "iteration", "iteration", 1.0),
        (axes[1], "train_s", "training time (min)", 60.0),
    ):
        if simulates:
            axis.plot(
                column(rows, name) / scale,
                column(rows, "episode_return_mean"),
                color="#4477aa",
                label="training, mean of 100 episodes",
            )
        if evaluations:
            axis.errorbar(
                column(evaluations, name) / scale,
                column(evaluations, "evaluation_return_mean"),
                yerr=column(evaluations, "evaluation_return_std"),
                fmt="o-",
                markersize=4,
                capsize=2,
                color="#ee6677",
                label="evaluation, mean and standard deviation",
            )
        _finish(axis, label)
    axes[0].set_ylabel("return")
    if simulates or evaluations:
        axes[0].legend(loc="best", fontsize=8)


def draw_throughput(figure: Figure, rows: Sequence[Row], title: str) -> None:
    """Environment steps per second, or those learned from where none is made, against training time."""
    axis = figure.subplots()
    simulates = _simulates(rows)
    speed = column(rows, "steps_per_second" if simulates else "samples_per_second")
    minutes = column(rows, "train_s") / 60
    axis.plot(minutes, speed, color="#4477aa", linewidth=0.6, alpha=0.5, label="each iteration")
    window = max(1, len(rows) // 50)
    if len(rows) >= 2 * window and window > 1:
        smooth = np.convolve(speed, np.ones(window) / window, mode="valid")
        axis.plot(minutes[window - 1 :], smooth, color="#4477aa", label=f"mean of {window}")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("environment steps per second" if simulates else "recorded steps learned from per second")
    axis.set_title(title)
    axis.legend(loc="best", fontsize=8)
    _finish(axis, "training time (min)")


def draw_time_split(figure: Figure, rows: Sequence[Row], title: str) -> None:
    """Parts of each iteration's wall time, stacked, mean over GMIs."""
    axis, named = figure.subplots(), time_parts(rows)
    wall_ms = column(rows, "iteration_s") * 1e3
    parts = [np.nan_to_num(column(rows, name)) * 1e3 for name, _, _ in named if name != "other_s"]
    parts.append(np.maximum(0.0, wall_ms - np.sum(parts, axis=0)))
    axis.stackplot(
        column(rows, "iteration"),
        parts,
        labels=[label for _, label, _ in named],
        colors=[colour for _, _, colour in named],
    )
    axis.set_ylim(0, float(np.nanpercentile(wall_ms, 98)) * 1.2 or 1.0)
    axis.set_ylabel("ms per iteration")
    axis.set_title(title)
    axis.legend(loc="upper right", fontsize=8, ncols=5)
    _finish(axis, "iteration")


def _simulates(rows: Sequence[Row]) -> bool:
    """Whether the run makes environment steps."""
    return any(row.get("env_steps_total") for row in rows)


def _finish(axis: Any, label: str) -> None:
    axis.set_xlabel(label)
    axis.grid(visible=True, alpha=0.3)
