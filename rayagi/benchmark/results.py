"""Benchmark results: measured and projected costs as rows, table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from collectives.alphabeta import AlphaBetaModel
from collectives.compositions import compose
from collectives.costs import project
from collectives.errors import ProfileError
from collectives.profile import CostProfile
from collectives.schedule import CollectiveSchedule
from placement.errors import counted
from placement.text import aligned
from rayagi.benchmark.measure import BenchmarkCase, LayoutMeasurement


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultRow:
    """One composition on one layout at one size. A model's cost is None if an interrupted profile lacks it."""

    layout: str
    nbytes: int
    composition: str
    steps: int
    median_s: float
    p10_s: float
    p90_s: float
    paper_s: float | None
    """GMI-DRL's projection from its unit costs (§3.2.1), without the broadcast back."""
    model_s: float | None
    """Projection of the alpha-beta model."""
    repeats_s: tuple[float, ...]

    @property
    def paper_error(self) -> float | None:
        """(measured - projected) / projected."""
        return None if self.paper_s is None else self.median_s / self.paper_s - 1

    @property
    def model_error(self) -> float | None:
        """(measured - projected) / projected."""
        return None if self.model_s is None else self.median_s / self.model_s - 1


def profile_of(measurements: Sequence[LayoutMeasurement], machine: str) -> CostProfile:
    """Profile of all timed steps, of all layouts."""
    points = tuple(point for measurement in measurements for point in measurement.points)
    return CostProfile(machine=machine, points=points)


def fitted(profile: CostProfile) -> AlphaBetaModel | None:
    """The model fitted to operations that were timed at two sizes or more; None if there are none."""
    sizes: dict[tuple[str, str], set[int]] = {}
    for point in profile.points:
        sizes.setdefault((point.shape.primitive, point.shape.op), set()).add(point.nbytes)
    enough = tuple(p for p in profile.points if len(sizes[p.shape.primitive, p.shape.op]) > 1)
    return AlphaBetaModel.fit(CostProfile(machine=profile.machine, points=enough)) if enough else None


def rows_of(measurements: Sequence[LayoutMeasurement], model: AlphaBetaModel | None) -> list[ResultRow]:
    """Every measured composition, by size, with the models' projections."""
    return [
        _row(compose(name, measurement.case.layout), nbytes, repeats, model)
        for measurement in measurements
        for (name, nbytes), repeats in sorted(measurement.repeats.items(), key=lambda item: item[0][1])
        if repeats  # empty after an early stop or a failure
    ]


def _row(
    schedule: CollectiveSchedule, nbytes: int, repeats: Sequence[float], model: AlphaBetaModel | None
) -> ResultRow:
    paper_s, model_s = _projections(schedule, nbytes, model)
    p10_s, median_s, p90_s = np.percentile(repeats, (10, 50, 90)).tolist()
    return ResultRow(
        layout=str(schedule.layout),
        nbytes=nbytes,
        composition=schedule.composition,
        steps=len(schedule.steps),
        median_s=median_s,
        p10_s=p10_s,
        p90_s=p90_s,
        paper_s=paper_s,
        model_s=model_s,
        repeats_s=tuple(repeats),
    )


def _projections(
    schedule: CollectiveSchedule, nbytes: int, model: AlphaBetaModel | None
) -> tuple[float | None, float | None]:
    """Seconds by the paper's unit costs, and by the model; None where the profile lacks what they need."""
    paper_s = model_s = None
    if model is not None:
        with suppress(KeyError):  # a primitive without a unit cost
            paper_s = project(schedule, model.unit_costs(schedule.layout, nbytes)).derived_s
        with suppress(ProfileError):
            model_s = sum(model.step_s(step, schedule.layout, nbytes) for step in schedule.steps)
    return paper_s, model_s


_HEAD = (
    "",
    "bytes",
    "composition",
    "steps",
    "paper",
    "error",
    "alpha-beta",
    "error",
    "measured",
    "p10 - p90",
)


def table(measurements: Sequence[LayoutMeasurement], rows: Sequence[ResultRow], cores: int) -> str:
    """Plain text: milliseconds and errors by layout, size and composition; a star marks the fastest of each size."""
    parts = []
    for measurement in measurements:
        layout = str(measurement.case.layout)
        lines = [f"{layout}: {where(measurement.case, cores)}"]
        own = [row for row in rows if row.layout == layout]
        right = {*range(len(_HEAD))} - {0, 2}
        lines += aligned([_HEAD, *(_cells(row, own) for row in own)], right)
        lines += _verdicts(own)
        unusable = [*measurement.case.skipped, *measurement.unavailable]
        lines += [f"{name}: no, {reason}" for name, reason in unusable]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def where(case: BenchmarkCase, cores: int) -> str:
    """Description of the layout's devices on this machine."""
    size = case.layout.world_size
    if case.gpus:
        return f"{counted(size, 'process', 'processes')} on {counted(len(case.gpus), 'GPU')}; milliseconds"
    return (
        f"{counted(size, 'process', 'processes')} on {counted(cores, 'core')}, without "
        "GPUs: devices and nodes are nominal, Gloo replaces rings over devices, "
        "and shared memory replaces reductions on a device; milliseconds"
    )


def _cells(row: ResultRow, others: Sequence[ResultRow]) -> tuple[str, ...]:
    fastest = min(other.median_s for other in others if other.nbytes == row.nbytes)
    return (
        "*" if row.median_s == fastest else "",
        f"{row.nbytes:,}",
        row.composition,
        str(row.steps),
        _ms(row.paper_s),
        _percent(row.paper_error),
        _ms(row.model_s),
        _percent(row.model_error),
        _ms(row.median_s),
        f"{_ms(row.p10_s)} - {_ms(row.p90_s)}",
    )


def _verdicts(rows: Sequence[ResultRow]) -> list[str]:
    """For each size: whether the model's choice is the fastest; if not, by how much it is slower."""
    lines = []
    for nbytes, group in groupby(rows, key=lambda row: row.nbytes):
        known = list(group)
        if len(known) < 2 or any(row.model_s is None for row in known):
            continue
        fastest = min(known, key=lambda row: row.median_s)
        chosen = min(known, key=lambda row: (row.model_s or 0.0, row.steps))
        if chosen is fastest:
            lines.append(f"{nbytes:,} bytes: the model chooses {chosen.composition}, the fastest")
        else:
            lines.append(
                f"{nbytes:,} bytes: the model chooses {chosen.composition}, {chosen.median_s / fastest.median_s:.2f} times "
                f"as long as the fastest, {fastest.composition}"
            )
    return lines


def to_dict(
    measurements: Sequence[LayoutMeasurement], rows: Sequence[ResultRow], header: dict[str, Any]
) -> dict[str, Any]:
    """JSON-ready; seconds and bytes."""
    return {
        **header,
        "layouts": [
            {
                "layout": str(measurement.case.layout),
                "processes": measurement.case.layout.world_size,
                "devices_are_labels": not measurement.case.gpus,
                "transports": measurement.transports,
                "skipped": dict([*measurement.case.skipped, *measurement.unavailable]),
            }
            for measurement in measurements
        ],
        "rows": [
            asdict(row) | {"paper_error": row.paper_error, "model_error": row.model_error} for row in rows
        ],
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.0%}"
