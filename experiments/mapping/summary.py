"""Medians over repeats beside the model's predictions, and the validation that they give."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rayagi.coordinator.model_validation import MIN_DIFFERENCE, ModelValidation


@dataclass(frozen=True, kw_only=True)
class Line:
    """One measurement of one case."""

    case: Mapping[str, Any]
    group: str
    name: str
    repeat: int
    steps_per_s: float
    predicted: float
    """The same, by the model."""
    num_gmis: int
    resident_bytes: float
    """Of all GMIs."""
    proportional_bytes: float
    """The same, with pages that several processes share counted once."""
    busy_before: float
    """Share of all cores that something else used before the measurement."""

    def text(self) -> str:
        """For the log."""
        return (
            f"{self.repeat} {self.group} {self.name}: {self.steps_per_s:,.0f} steps/s, predicted "
            f"{self.predicted:,.0f} ({self.busy_before:.0%} busy before)"
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case over all repeats."""

    group: str
    name: str
    num_gmis: int
    steps_per_s: tuple[float, ...]
    predicted: float
    resident_bytes: float

    @property
    def median(self) -> float:
        """Steps per second."""
        return statistics.median(self.steps_per_s)


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """A row per case, in the order in which they were measured."""
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.group, line.name), []).append(line)
    return [
        Row(
            group=group,
            name=name,
            num_gmis=repeats[0].num_gmis,
            steps_per_s=tuple(line.steps_per_s for line in repeats),
            predicted=repeats[0].predicted,
            resident_bytes=statistics.median(line.resident_bytes for line in repeats),
        )
        for (group, name), repeats in found.items()
    ]


def validation_of(lines: Sequence[Line], origin: Mapping[str, Any]) -> ModelValidation:
    """The model's error and ranking in these measurements."""
    return validate(
        rows_of(lines),
        date=str(origin["date"])[:10],
        cpu=str(origin["cpu_model"]),
        cores=int(origin["cores"]),
        kinds=list(dict.fromkeys(line.group.rpartition(" ")[2] for line in lines)),
    )


def validate(
    rows: Sequence[Row], *, date: str, cpu: str, cores: int, kinds: Sequence[str]
) -> ModelValidation:
    """Compare predictions with measurements. Rows of a group are alternatives: the same task and kind of work."""
    pairs = [
        (one, other)
        for one, other in combinations(rows, 2)
        if one.group == other.group
        and max(one.median, other.median) > (1 + MIN_DIFFERENCE) * min(one.median, other.median)
    ]
    errors = sorted(abs(row.predicted / row.median - 1) for row in rows)
    return ModelValidation(
        date=date,
        cpu=cpu,
        cores=cores,
        kinds=tuple(kinds),
        cases=len(rows),
        pairs=len(pairs),
        right=sum((one.predicted > other.predicted) == (one.median > other.median) for one, other in pairs),
        median_error=statistics.median(errors),
        p90_error=errors[-(-9 * len(errors) // 10) - 1],
    )


def table(lines: Sequence[Line]) -> str:
    """Markdown, a line per case, the fastest of each group first."""
    head = ("work", "template, simulators x environments", "GMIs", "steps/s", "lowest - highest", "predicted",
            "predicted / measured", "resident MiB")  # fmt: skip
    rows = rows_of(lines)
    groups = list(dict.fromkeys(row.group for row in rows))
    rows.sort(key=lambda row: (groups.index(row.group), -row.median))
    cells = [head, ("---",) * len(head), *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.group,
        row.name,
        str(row.num_gmis),
        f"{row.median:,.0f}",
        f"{min(row.steps_per_s):,.0f} - {max(row.steps_per_s):,.0f}",
        f"{row.predicted:,.0f}",
        f"{row.predicted / row.median:.2f}",
        f"{row.resident_bytes / 2**20:,.0f}",
    )
