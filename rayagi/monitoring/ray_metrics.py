"""The catalogue's metrics as Ray metrics, so that the Ray dashboard's Prometheus export carries them per GMI.

Names appear there as ``ray_rayagi_<name>``; counters end in ``_total``. Tags carry the GMI's identity, not the
worker's: a GMI that is rebuilt in another process goes on with its series.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from actors.protocols import IterationResult
from rayagi.monitoring.catalogue import CATALOGUE

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge

TAG_KEYS = ("run", "task", "gmi", "slice")
COUNTED = frozenset({"env_steps", "episodes"})
"""Quantities that add up over a run; the others are values of the newest iteration."""


class Exporter:
    """Lives in a GMI's process; without a Ray worker around it, it does nothing."""

    def __init__(self, tags: dict[str, str]) -> None:
        """Declare the metrics.

        Args:
            tags: a value for each of ``run``, ``task``, ``gmi`` and ``slice``.

        Raises:
            ValueError: a tag is missing or unknown.
        """
        if set(tags) != set(TAG_KEYS):
            raise ValueError(f"tags {sorted(tags)} must be {sorted(TAG_KEYS)}")
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._return: Gauge | None = None
        if _inside_ray():
            self._declare(tags)

    def export(self, result: IterationResult) -> None:
        """Hand one iteration's values to Ray, which sends them on by itself."""
        for name, counter in self._counters.items():
            # Ray refuses to add zero.
            if (amount := result.metrics.get(name, 0.0)) > 0:
                counter.inc(amount)
        for name, gauge in self._gauges.items():
            value = result.metrics.get(name)
            if value is not None and math.isfinite(value):
                gauge.set(value)
        if self._return is not None and result.episode_returns:
            self._return.set(sum(result.episode_returns) / len(result.episode_returns))

    def _declare(self, tags: dict[str, str]) -> None:
        from ray.util.metrics import Counter, Gauge

        for metric in CATALOGUE:
            text = f"{metric.help} ({metric.unit})" if metric.unit else metric.help
            kind = Counter if metric.name in COUNTED else Gauge
            declared = kind(f"rayagi_{metric.name}", description=text, tag_keys=TAG_KEYS)
            declared.set_default_tags(tags)
            (self._counters if kind is Counter else self._gauges)[metric.name] = declared
        self._return = Gauge(
            "rayagi_episode_return",
            description="mean return of the episodes that ended in the newest iteration with any",
            tag_keys=TAG_KEYS,
        )
        self._return.set_default_tags(tags)


def _inside_ray() -> bool:
    try:
        import ray
    except ImportError:
        return False
    return bool(ray.is_initialized())
