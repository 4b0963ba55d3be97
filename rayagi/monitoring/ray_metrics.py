"""Exports the catalogue's metrics as Ray metrics, for the Prometheus endpoint of the Ray dashboard.

Names are ``ray_rayagi_<name>`` per GMI and ``ray_rayagi_run_<name>`` for the run; counters end in ``_total``. Tags have the
GMI's identity, not the worker's: a GMI that restarts in another process continues its series.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rayagi.monitoring.catalogue import DERIVED, EVALUATION, Metric
from rayagi.run.limits import Position
from rayagi.run.recorders import Recorder, Values

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge

TAG_KEYS = ("run", "task", "gmi", "slice")


class Exporter:
    """Exports from a Ray worker or driver process; does nothing elsewhere."""

    def __init__(self, metrics: Sequence[Metric], tags: dict[str, str], *, prefix: str = "rayagi_") -> None:
        """Declare the metrics.

        Args:
            metrics: of the catalogue.
            tags: a value for each of ``run``, ``task``, ``gmi`` and ``slice``.
            prefix: of the metric names.
        """
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            self._declare(metrics, tags, prefix)

    def export(self, values: Mapping[str, float | None]) -> None:
        """Set values by name; Ray sends them by itself. Undeclared metrics are ignored."""
        for name, counter in self._counters.items():
            # Ray counters reject zero.
            if (amount := values.get(name) or 0.0) > 0:
                counter.inc(amount)
        for name, gauge in self._gauges.items():
            value = values.get(name)
            if value is not None and math.isfinite(value):
                gauge.set(value)

    def _declare(self, metrics: Sequence[Metric], tags: dict[str, str], prefix: str) -> None:
        # Imported here: programs and tests without Ray do not load it.
        from ray.util.metrics import Counter, Gauge

        for metric in metrics:
            text = f"{metric.help} ({metric.unit})" if metric.unit else metric.help
            name = f"{prefix}{metric.name}"
            declared: Counter | Gauge
            if metric.kind == "counter":
                declared = self._counters[metric.name] = Counter(name, description=text, tag_keys=TAG_KEYS)
            else:
                declared = self._gauges[metric.name] = Gauge(name, description=text, tag_keys=TAG_KEYS)
            declared.set_default_tags({name: _ascii(value) for name, value in tags.items()})


def _ascii(text: str) -> str:
    """Ray takes no other characters; names of runs and tasks may have some."""
    return text.encode("ascii", "backslashreplace").decode("ascii")


_METRICS = tuple(dict.fromkeys((*DERIVED, *EVALUATION)))


class RunExporter(Exporter, Recorder):
    """Recorder for Ray metrics, named ``rayagi_run_<name>`` and tagged ``gmi="all"``."""

    def __init__(self, *, run: str, task: str) -> None:
        tags = {"run": run, "task": task, "gmi": "all", "slice": "all"}
        super().__init__(_METRICS, tags, prefix="rayagi_run_")

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Export the newest row."""
        self.export(rows[-1])

    def evaluated(self, row: Values, *, best: bool) -> None:
        """Export the evaluation."""
        self.export(row)
