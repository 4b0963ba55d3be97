"""Exports the run's merged metrics as Ray metrics, beside those of each GMI."""

from __future__ import annotations

from collections.abc import Sequence

from rayagi.monitoring.catalogue import DERIVED, EVALUATION
from rayagi.monitoring.ray_metrics import Exporter
from rayagi.run.limits import Position
from rayagi.run.recorders import Values

_METRICS = tuple(dict.fromkeys((*DERIVED, *EVALUATION)))


class RunExporter:
    """Recorder for Ray metrics, named ``rayagi_run_<name>`` and tagged ``gmi="all"``."""

    def __init__(self, *, run: str, task: str) -> None:
        tags = {"run": run, "task": task, "gmi": "all", "slice": "all"}
        self._exporter = Exporter(_METRICS, tags, prefix="rayagi_run_")

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Export the newest row."""
        self.export(rows[-1])

    def evaluated(self, row: Values, *, best: bool) -> None:
        """Export the evaluation."""
        self.export(row)

    def export(self, values: Values) -> None:
        """Export merged values by their names in the catalogue."""
        self._exporter.export(values)

    def saved(self, checkpoint: str) -> None:
        """Do nothing: no metric changes."""

    def rewound(self, position: Position) -> None:
        """Do nothing: the next row has the position."""
