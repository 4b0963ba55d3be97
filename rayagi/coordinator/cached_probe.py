"""Cached probe of a search: looks measurements up in the store, starts Ray on demand, and enforces the time budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from placement.search import TrialFailure, TrialMeasurement
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.probe import SCREENING, VALIDATION, SessionProbe
from rayagi.coordinator.search_store import SearchStore


class LazyRayConnection:
    """A Ray connection that is opened by the first trial and kept for all trials."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._is_open = stack, False

    def open(self) -> None:
        """Connect, unless already connected."""
        if not self._is_open:
            self._stack.enter_context(connected())
            self._is_open = True


class BudgetSpentError(Exception):
    """The time budget does not allow another trial."""


class CachedProbe:
    """Returns stored outcomes; measures and stores missing ones until the budget is spent."""

    def __init__(
        self,
        probe: SessionProbe,
        store: SearchStore,
        ray: LazyRayConnection,
        on_start: Callable[[str], None],
        ends_at: float | None,
    ) -> None:
        self._probe, self._store, self._ray, self._on_start = probe, store, ray, on_start
        self._ends_at = ends_at

    def screen(self, gmis_per_gpu: int, num_envs: int) -> TrialMeasurement | TrialFailure:
        """Implements placement.search.Probe."""
        return self._outcome(gmis_per_gpu, num_envs, 0)

    def validate(self, gmis_per_gpu: int, num_envs: int, round_: int) -> TrialMeasurement | TrialFailure:
        """Implements placement.validation.RemeasureFn."""
        return self._outcome(gmis_per_gpu, num_envs, round_)

    def compare(self, gmis_per_gpu: int, num_envs: int, times: int) -> TrialMeasurement | TrialFailure:
        """Implements placement.search.CompareFn."""
        return self._outcome(gmis_per_gpu, num_envs, -times)

    def _outcome(self, gmis_per_gpu: int, num_envs: int, round_: int) -> TrialMeasurement | TrialFailure:
        kept = self._store.outcome(gmis_per_gpu, num_envs, round_)
        if kept is not None:
            if isinstance(kept, TrialMeasurement):
                self._probe.remember(gmis_per_gpu, kept.steps_per_s)
            return kept
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            raise BudgetSpentError
        self._ray.open()
        again = f" again (round {round_})" if round_ > 0 else " again, to compare" if round_ else ""
        self._on_start(f"{gmis_per_gpu} x {num_envs} environments{again}")
        outcome = self._probe.measure(gmis_per_gpu, num_envs, VALIDATION if round_ > 0 else SCREENING)
        self._store.save_outcome(gmis_per_gpu, num_envs, outcome, round_)
        return outcome
