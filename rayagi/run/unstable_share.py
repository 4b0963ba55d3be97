"""Ends a run whose simulations become unstable too often."""

from __future__ import annotations

from collections.abc import Mapping

from rayagi.run.errors import UnstableSimulationsError

_WINDOW_STEPS = 10_000
"""Environment steps of a window: fewer give no reliable share."""


class UnstableShare:
    """Counts unstable simulations in windows of at least 10,000 environment steps."""

    def __init__(self, limit: float) -> None:
        """``limit``: largest share of environment steps that may become unstable (``env.max_unstable_share``)."""
        self._limit, self._unstable, self._steps = limit, 0.0, 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add an iteration's counts.

        Raises:
            UnstableSimulationsError: the share of a window exceeds the limit.
        """
        self._unstable += metrics.get("faults_unstable", 0.0)
        self._steps += metrics.get("env_steps", 0.0)
        if self._steps < _WINDOW_STEPS:
            return
        if self._unstable > self._limit * self._steps:
            raise UnstableSimulationsError(int(self._unstable), int(self._steps), self._limit)
        self._unstable = self._steps = 0.0
