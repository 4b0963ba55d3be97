"""The probe as a search asks it: nothing is measured twice, Ray starts when it is needed, and time is limited."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from placement.search import Failed, Measured
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.probe import CONFIRMING, DECIDING, SessionProbe
from rayagi.coordinator.search_store import SearchStore


class OnDemand:
    """A connection to Ray that is made when it is first needed and held for all trials."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self._is_open = stack, False

    def open(self) -> None:
        """Connect, unless that was done."""
        if not self._is_open:
            self._stack.enter_context(connected())
            self._is_open = True


class BudgetSpentError(Exception):
    """A trial would have to be run, and there is no time left for it."""


class KeptProbe:
    """Answers from the store where it can; measures and keeps where not, until the budget is spent."""

    def __init__(
        self,
        probe: SessionProbe,
        store: SearchStore,
        ray: OnDemand,
        on_start: Callable[[str], None],
        ends_at: float | None,
    ) -> None:
        self._probe, self._store, self._ray, self._on_start = probe, store, ray, on_start
        self._ends_at = ends_at

    def decide(self, gmis_per_gpu: int, num_envs: int) -> Measured | Failed:
        """Implements placement.search.Probe."""
        return self._outcome(gmis_per_gpu, num_envs, 0)

    def confirm(self, gmis_per_gpu: int, num_envs: int, round_: int) -> Measured | Failed:
        """Implements placement.confirmation.Again."""
        return self._outcome(gmis_per_gpu, num_envs, round_)

    def compare(self, gmis_per_gpu: int, num_envs: int, times: int) -> Measured | Failed:
        """Implements placement.search.Compare."""
        return self._outcome(gmis_per_gpu, num_envs, -times)

    def _outcome(self, gmis_per_gpu: int, num_envs: int, round_: int) -> Measured | Failed:
        kept = self._store.outcome(gmis_per_gpu, num_envs, round_)
        if kept is not None:
            return kept
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            raise BudgetSpentError
        self._ray.open()
        again = f" again (round {round_})" if round_ > 0 else " again, to compare" if round_ else ""
        self._on_start(f"{gmis_per_gpu} x {num_envs} environments{again}")
        outcome = self._probe.measure(gmis_per_gpu, num_envs, CONFIRMING if round_ > 0 else DECIDING)
        self._store.keep_outcome(gmis_per_gpu, num_envs, outcome, round_)
        return outcome
