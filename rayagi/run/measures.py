"""Functions of the training loop over results, states and counters, and the limit of unstable simulations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from actors.protocols import EvaluationResult
from rayagi.run.errors import UnstableSimulationsError
from rayagi.run.limits import EpisodeWindow, Position


def position_of(counters: Mapping[str, Any]) -> Position:
    """Progress of a run at a checkpoint."""
    window = EpisodeWindow()
    window.load(counters["window"])
    return Position(
        iteration=int(counters["iteration"]),
        env_steps=int(counters["env_steps"]),
        train_s=float(counters["train_s"]),
        evaluation_return=counters["evaluation_return"],
        training_return=window.return_mean(),
        training_episodes=len(window),
    )


def evaluation_row(result: EvaluationResult, position: Position) -> dict[str, float]:
    """An evaluation as a row of evaluations.csv."""
    returns = np.array(result.episode_returns)
    return {
        "iteration": position.iteration,
        "env_steps_total": position.env_steps,
        "train_s": position.train_s,
        "evaluation_return_mean": result.mean_return(),
        "evaluation_return_std": float(returns.std()),
        "evaluation_return_min": float(returns.min()),
        "evaluation_return_max": float(returns.max()),
        "evaluation_length_mean": sum(result.episode_lengths) / max(1, len(result.episode_lengths)),
        "evaluation_episodes": len(result.episode_returns),
    }


def first_non_finite(state: Any, name: str = "state") -> tuple[str, float] | None:
    """Name and value of the first non-finite tensor entry, depth first; None if all are finite."""
    # Imported here: the other functions do not need torch.
    import torch

    if isinstance(state, torch.Tensor):
        if state.is_floating_point() and not bool(torch.isfinite(state).all()):
            return name, float(state[~torch.isfinite(state)].reshape(-1)[0])
        return None
    entries = (
        state.items()
        if isinstance(state, Mapping)
        else enumerate(state)
        if isinstance(state, list | tuple)
        else ()
    )
    for key, value in entries:
        found = first_non_finite(value, f"{name}.{key}" if name != "state" else str(key))
        if found is not None:
            return found
    return None


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
