"""Puts what the driver works out of all GMIs into Ray's export, beside what each of them exports itself."""

from __future__ import annotations

from collections.abc import Sequence

from rayagi.monitoring.catalogue import DERIVED, EVALUATION
from rayagi.monitoring.ray_metrics import Exporter
from rayagi.run.limits import Position
from rayagi.run.recorders import Values

_METRICS = tuple(dict.fromkeys((*DERIVED, *EVALUATION)))


class RunExporter:
    """A recorder. Its metrics are named ``rayagi_run_<name>`` and tagged ``gmi="all"``."""

    def __init__(self, *, run: str, task: str) -> None:
        tags = {"run": run, "task": task, "gmi": "all", "slice": "all"}
        self._exporter = Exporter(_METRICS, tags, prefix="rayagi_run_")

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Export the newest row."""
        self.export(rows[-1])

    def evaluated(self, row: Values, *, best: bool) -> None:
        """Export it."""
        self.export(row)

    def export(self, values: Values) -> None:
        """Hand numbers of all GMIs together to Ray, by their names in the catalogue."""
        self._exporter.export(values)

    def saved(self, checkpoint: str) -> None:
        """Nothing: no number changes."""

    def rewound(self, position: Position) -> None:
        """Nothing: the next row says where the run is."""
