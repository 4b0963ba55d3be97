"""Medians, spread, and how far the placement model's prediction is from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from experiments.mapping.cases import BASELINE, template_of
from placement.templates import Mode, UnitCosts, estimate, unit_costs_from_dict


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case over all repeats."""

    task: str
    num_envs: int
    mode: Mode
    template: str
    num_gmis: int
    steps_per_s: tuple[float, ...]
    """Of each repeat."""
    resident_bytes: float
    """Median over repeats, of all GMIs."""
    proportional_bytes: float
    predicted_steps_per_s: float | None
    """By the model; None where unit costs could not be measured."""
    speed: tuple[float, ...] = ()
    """Relative to dp_only in the same repeat."""
    predicted_speed: float | None = None
    """The same, by the model."""
    memory: float = 1.0
    """Resident, relative to dp_only."""

    @property
    def median(self) -> float:
        """Steps per second."""
        return statistics.median(self.steps_per_s)


def rows_of(lines: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]]) -> list[Row]:
    """A row per case, in the order in which they were measured."""
    known = {(cost["task"], cost["num_envs"]): _unit_costs(cost) for cost in costs if "failed" not in cost}
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for line in lines:
        if "failed" not in line:
            key = line["task"], line["num_envs"], line["mode"], line["template"]
            found.setdefault(key, {})[line["repeat"]] = line
    rows = []
    for (task, num_envs, mode, template), repeats in found.items():
        base = found.get((task, num_envs, mode, BASELINE), {})
        both = [repeat for repeat in repeats if repeat in base]
        predicted = [
            _predicted(known.get((task, num_envs)), mode, name, of)
            for name, of in ((template, repeats), (BASELINE, base))
        ]
        resident = _median(repeats.values(), "resident_bytes")
        rows.append(
            Row(
                task=task,
                num_envs=num_envs,
                mode=mode,
                template=template,
                num_gmis=next(iter(repeats.values()))["num_gmis"],
                steps_per_s=tuple(line["steps_per_s"] for line in repeats.values()),
                resident_bytes=resident,
                proportional_bytes=_median(repeats.values(), "proportional_bytes"),
                predicted_steps_per_s=predicted[0],
                speed=tuple(repeats[repeat]["steps_per_s"] / base[repeat]["steps_per_s"] for repeat in both),
                predicted_speed=None if None in predicted else predicted[0] / predicted[1],
                memory=resident / _median(base.values(), "resident_bytes") if base else 1.0,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown, a line per case."""
    head = (
        "task", "envs per simulator", "work", "template", "GMIs", "steps/s, median", "lowest - highest",
        "/ dp_only, median", "lowest - highest", "predicted", "resident MiB", "/ dp_only", "PSS MiB",
    )  # fmt: skip
    cells = [head, ("---",) * len(head), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cells(row: Row) -> tuple[str, ...]:
    speed = (f"{statistics.median(row.speed):.2f}", _range(row.speed, ".2f")) if row.speed else ("-", "-")
    return (
        row.task,
        str(row.num_envs),
        "training" if row.mode == "synchronous" else row.mode,
        row.template,
        str(row.num_gmis),
        f"{row.median:,.0f}",
        _range(row.steps_per_s, ",.0f"),
        *speed,
        "-" if row.predicted_speed is None else f"{row.predicted_speed:.2f}",
        f"{row.resident_bytes / 2**20:,.0f}",
        f"{row.memory:.2f}",
        f"{row.proportional_bytes / 2**20:,.0f}",
    )


def _range(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} - {max(values):{form}}"


def _median(lines: Any, name: str) -> float:
    return statistics.median(float(line[name]) for line in lines)


def _unit_costs(line: dict[str, Any]) -> UnitCosts:
    names = {field.name for field in fields(UnitCosts)}
    return unit_costs_from_dict({name: value for name, value in line.items() if name in names})


def _predicted(
    costs: UnitCosts | None, mode: Mode, template: str, repeats: dict[int, dict[str, Any]]
) -> float | None:
    if costs is None or not repeats:
        return None
    num_trainers = next(iter(repeats.values()))["num_trainers"]
    return estimate(template_of(mode, template), costs, num_gmis=max(1, num_trainers)).steps_per_s
