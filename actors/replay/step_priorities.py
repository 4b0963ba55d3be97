"""Priorities of single timesteps of trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.replay.errors import ReplayError
from actors.replay.rows import Keys, Selection, non_negative, whole
from actors.replay.selection import PrioritizedSteps
from actors.replay.store import ReplayStore
from actors.replay.tree import Floats


class StepPriorities:
    """A priority for each timestep of a store's rows (Schaul et al. 2016, eq. 1).

    The step's weight is its priority to the power of the exponent, and a row's priority is the sum of its steps' weights.
    The store is the only shard of its table and was created for ``Prioritized()``. One process inserts and selects.

    Attributes:
        weights: of each timestep, 0 behind the end of its row    (capacity, max_length)
    """

    def __init__(self, store: ReplayStore, exponent: float) -> None:
        """Raises ReplayError: the exponent is negative or not finite, or the store has other shards."""
        if not 0 <= exponent < np.inf:
            raise ReplayError(f"exponent {exponent}: use a finite number that is at least 0")
        if store.num_shards > 1:
            raise ReplayError("timesteps have priorities in tables of one shard")
        self._store, self._exponent = store, exponent
        self.weights: Floats = np.zeros((store.capacity, store.schema.max_length))

    def selector(self, importance: float = 0.0) -> PrioritizedSteps:
        """Selects timesteps in proportion to their weights as they are then. ``importance``: as of ``Prioritized``."""
        return PrioritizedSteps(self.weights, importance)

    def insert(self, rows: Mapping[str, Any], lengths: ArrayLike, priority: float) -> Keys:
        """``ReplayStore.insert`` rows whose timesteps all have the same priority. Raises as it does, and as ``update``."""
        (value,), sizes = non_negative("priority", priority, 1), np.atleast_1d(whole("lengths", lengths))
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            weight = value**self._exponent if value else 0.0
            weights = np.where(np.arange(self.weights.shape[1]) < sizes[:, None], weight, 0.0)
            # Added in the kernel's order.
            sums = np.ascontiguousarray(weights.cumsum(1)[:, -1])
        keys = self._store.insert(rows, lengths, priorities=sums)
        self.weights[keys.indices] = weights
        return keys

    def update(self, selection: Selection, priorities: ArrayLike) -> None:
        """Set the priorities of selected timesteps, (n,). Those of rows that were overwritten since are left alone.

        If a timestep is named several times, its last priority counts.

        Raises:
            ReplayError: a priority is negative or not finite, or its weight is not.
        """
        self._store.update_steps(selection.keys, selection.steps, priorities, self._exponent, self.weights)

    def load(self, weights: NDArray[Any] | None) -> None:
        """Restore saved ``weights`` after the store, which may have more rows. None: each step has its row's priority.

        Raises:
            ReplayError: the weights are of rows of another length, or of more rows.
        """
        self.weights[:] = 0.0
        if weights is not None:
            capacity, length = self.weights.shape
            if weights.ndim != 2 or weights.shape[1] != length or len(weights) > capacity:
                raise ReplayError(f"weights are {list(weights.shape)}: use up to {capacity} rows of {length}")
            self.weights[: len(weights)] = weights
            return
        status = self._store.status()
        row, step = (np.arange(self.weights.shape[1]) < status["length"][:, None]).nonzero()
        keys = Keys(row, status["generation"][row])
        self._store.update_steps(keys, step, status["priority"][row], self._exponent, self.weights)
