"""Measurements of one machine, each kept at once as a line of JSON, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from experiments.throughput.watch import WaitPolicy

Labels: TypeAlias = Mapping[str, object]
"""What tells one case from another: form, num_envs, steps_per_call, ..."""
Measured: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]]]
"""Labels, and the values of each repeat."""
RATE = "steps_per_s"
SAME = ("cpu_model", "cores")
"""Rows of different machines do not belong into one file."""


class Records:
    """A file of measurements: a line with the origin for each start, and a line for each measurement."""

    def __init__(self, path: Path, header: Mapping[str, object]) -> None:
        """Read what is there and note who goes on.

        Raises:
            SystemExit: the file is of another machine, or is not such a file.
        """
        self.path = path
        self.origins: list[dict[str, object]] = []
        self.rows: list[dict[str, Any]] = []
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
            self._take(line, number)
        for earlier in self.origins:
            other = [name for name in SAME if earlier.get(name) != header.get(name)]
            if other:
                raise SystemExit(
                    f"{path} holds measurements with another {', '.join(other)}; give another --out"
                )
        if not self.origins or _undated(self.origins[-1]) != _undated(header):
            self.origins.append(dict(header))
            self._write({"origin": self.origins[-1]})

    @classmethod
    def parsed(cls, entries: Iterable[Mapping[str, Any]]) -> Self:
        """The entries of a file, to be read only."""
        made = cls.__new__(cls)
        made.path, made.origins, made.rows = Path(), [], []
        for number, entry in enumerate(entries, 1):
            made._take(json.dumps(entry), number)
        return made

    def _take(self, line: str, number: int) -> None:
        try:
            entry = json.loads(line)
            if "origin" in entry:
                self.origins.append(entry["origin"])
            else:
                row = {name: entry[name] for name in ("figure", "labels", "repeat", "values")}
                # Rows without it were measured when threads always slept.
                self.rows.append({**row, "waiting": entry.get("waiting", "PASSIVE")})
        except (json.JSONDecodeError, KeyError, TypeError):
            raise SystemExit(f"{self.path}, line {number}: this is no measurement: {line[:80]}") from None

    def has(self, figure: str, labels: Labels, repeat: int, waiting: WaitPolicy) -> bool:
        """Whether this is measured already."""
        sought = (figure, dict(labels), repeat, waiting)
        return any(
            (row["figure"], row["labels"], row["repeat"], row["waiting"]) == sought for row in self.rows
        )

    def add(
        self, figure: str, labels: Labels, repeat: int, values: Mapping[str, object], waiting: WaitPolicy
    ) -> None:
        """Keep a measurement, on disk when this returns. ``waiting``: how OpenMP's idle threads did."""
        row = {
            "figure": figure,
            "labels": dict(labels),
            "repeat": repeat,
            "waiting": waiting,
            "values": dict(values),
        }
        self.rows.append(row)
        self._write(row)

    def of(self, figure: str) -> list[Measured]:
        """Each case of a figure with the values of its repeats, in the order in which they were first measured.

        Of a case that was measured with spinning and with sleeping threads: the repeats of the faster way.
        """
        found: dict[str, dict[WaitPolicy, Measured]] = {}
        for row in self.rows:
            if row["figure"] == figure:
                ways = found.setdefault(json.dumps(row["labels"], sort_keys=True), {})
                ways.setdefault(row["waiting"], (row["labels"], []))[1].append(row["values"])
        return [
            max(ways.values(), key=_rate) if len(ways) > 1 else next(iter(ways.values()))
            for ways in found.values()
        ]

    def _write(self, entry: Mapping[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _rate(measured: Measured) -> float:
    _, values = measured
    return statistics.median(one[RATE] for one in values)


def _undated(header: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in header.items() if name != "date"}


def by(cases: Iterable[Measured], *names: str) -> dict[tuple[Any, ...], list[Measured]]:
    """Cases in groups that have the same values of some labels, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Measured]] = defaultdict(list)
    for labels, values in cases:
        groups[tuple(labels[name] for name in names)].append((labels, values))
    return dict(groups)
