"""The last training episodes of all GMIs, pooled."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 100
"""Episodes over which training returns are averaged."""


class EpisodeWindow:
    """Returns and lengths of the newest episodes."""

    def __init__(self, size: int = WINDOW) -> None:
        self._returns: deque[float] = deque(maxlen=size)
        self._lengths: deque[int] = deque(maxlen=size)
        self._size = size
        self._terms: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._returns)

    def add(
        self,
        returns: Sequence[float],
        lengths: Sequence[int],
        reward_terms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Add the episodes of one iteration: their returns, lengths, and sums of each reward term."""
        for name, sums in (reward_terms or {}).items():
            self._terms.setdefault(name, deque(maxlen=self._size)).extend(sums)
        self._returns.extend(returns)
        self._lengths.extend(lengths)

    def return_mean(self) -> float | None:
        """Mean return; None before the first episode ended."""
        return sum(self._returns) / len(self._returns) if self._returns else None

    def length_mean(self) -> float | None:
        """Mean length in steps; None before the first episode ended."""
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    def reward_term_means(self) -> dict[str, float]:
        """Mean episode sum of each reward term that has occurred."""
        return {name: sum(sums) / len(sums) for name, sums in self._terms.items() if sums}

    def to_dict(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed learning curve is continuous."""
        return {
            "returns": list(self._returns),
            "lengths": [float(length) for length in self._lengths],
            "reward_terms": {name: list(sums) for name, sums in self._terms.items()},
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        self._returns.clear()
        self._lengths.clear()
        self._terms.clear()
        lengths = [int(length) for length in stored["lengths"]]
        self.add(stored["returns"], lengths, stored.get("reward_terms"))
