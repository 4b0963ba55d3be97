"""Actions of a dataset beyond the environment's range: counted, refused where their units are others, clipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.protocols import EnvInfo
from rayagi.replay.trajectories import Source, TrajectoryBatch
from rayagi.serving.errors import DatasetError

_ROUNDING = 1e-6
"""float32 rounds limits, outwards too."""


class RangeCheck:
    """Counts the actions of a dataset that are beyond their range. Choices, and actions without limits, have none."""

    def __init__(self, info: EnvInfo) -> None:
        """``info``: of the environment."""
        self._env_id = info.env_id
        limits = ((), ()) if info.action.is_discrete else (info.action.low, info.action.high)
        self._low, self._high = (np.array(limit, np.float64) for limit in limits)
        size = len(self._low)
        self._total = self._affected = 0
        self._counts = np.zeros(size, np.int64)
        self._least, self._most = np.full(size, np.inf), np.full(size, -np.inf)

    def add(self, actions: NDArray[Any]) -> None:
        """Count actions, (n, dim)."""
        if not len(self._low) or not len(actions):
            return
        values = actions.reshape(-1, len(self._low))
        beyond = values < self._low - _ROUNDING * (1 + abs(self._low))
        beyond |= values > self._high + _ROUNDING * (1 + abs(self._high))
        self._total += len(values)
        self._affected += int(beyond.any(1).sum())
        self._counts += beyond.sum(0)
        self._least, self._most = (
            np.minimum(self._least, values.min(0)),
            np.maximum(self._most, values.max(0)),
        )

    @property
    def is_always_beyond(self) -> bool:
        """Whether a component has been beyond its range in every action so far."""
        return self._total > 0 and bool((self._counts == self._total).any())

    def refuse_other_units(self, source: Source) -> None:
        """Raise DatasetError: a component is beyond its range in every action."""
        if self.is_always_beyond:
            worst, there, possible = self._worst()
            reason = f"has component {worst} of every action beyond {self._env_id}'s range: it is from {there} where "
            raise DatasetError(
                str(source.path),
                f"{reason}{possible} is possible; convert the actions to the environment's units",
            )

    def notes(self, source: Source) -> tuple[str, ...]:
        """What to say of the actions; empty: all are within the range."""
        if not self._affected:
            return ()
        worst, there, possible = self._worst()
        text = (
            f"{source.path} has actions beyond {self._env_id}'s range: {self._affected:,} of {self._total:,}, most of them "
            f"in component {worst}, which is from {there} where {possible} is possible. They count as at the limits, where "
            "the environment clips them; if the dataset has other units, convert them."
        )
        return (text,)

    def _worst(self) -> tuple[int, str, str]:
        """The component that is beyond its range most often, its values and its range."""
        worst = int(self._counts.argmax())
        there = f"{self._least[worst]:g} to {self._most[worst]:g}"
        return worst, there, f"{self._low[worst]:g} to {self._high[worst]:g}"


def refuse_other_units(source: Source, info: EnvInfo) -> None:
    """Refuse actions of which a component is never within its range.

    Reads until each component has been: a batch, unless the units are others.

    Raises:
        DatasetError: a component is beyond its range in every action.
    """
    check = RangeCheck(info)
    for batch in source.batches():
        check.add(batch.columns["action"])
        if not check.is_always_beyond:
            return
    check.refuse_other_units(source)


def clipped(source: Source, info: EnvInfo) -> Source:
    """The same dataset with actions in their range: the environment clips them, as in recordings of rayagi serve."""
    if info.action.is_discrete or not info.action.low:
        return source
    low, high = (np.array(limits, np.float32) for limits in (info.action.low, info.action.high))

    def clip(batch: TrajectoryBatch) -> TrajectoryBatch:
        return TrajectoryBatch(
            {**batch.columns, "action": batch.columns["action"].clip(low, high)}, batch.lengths
        )

    return replace(source, begin=lambda: map(clip, source.begin()))
