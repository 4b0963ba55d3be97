"""Interfaces, settings and result of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.protocols import EvaluationResult, IterationResult
from placement.errors import SliceLostError
from rayagi.run.limits import Limits, Position, ReturnSource, Stop


class TrainingSession(Protocol):
    """The part of rayagi.coordinator's Session that the loop uses."""

    def submit(self, num_iterations: int, /) -> Any:
        """Start iterations on every GMI, without waiting."""

    def collect(self) -> list[IterationResult]:
        """Wait for the submitted iterations; one merged result per iteration."""

    def evaluate(self, num_episodes: int, *, seed: int) -> EvaluationResult:
        """Run whole episodes without learning."""

    def state_dict(self) -> dict[str, Any]:
        """``{"shared", "local", "num_gmis"}``."""

    def save_replays(self, folder: Path, /) -> dict[int, str]:
        """Write the replay of each GMI that has one. Returns by GMI why it failed, or ''."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a saved state."""


class HealthMonitor(Protocol):
    """Monitors the GMIs, and may replace the session (rayagi.coordinator.health_monitor)."""

    def check_health(self, position: Position, /) -> None:
        """Check the last collected results."""

    @property
    def replan_pending(self) -> bool:
        """Whether the loop should continue in another session after its next checkpoint."""

    def replan(self, state: Mapping[str, Any], /) -> TrainingSession:
        """Close the session, and open one with the new plan that continues from ``state``."""

    def recover(self, lost: SliceLostError, state: Mapping[str, Any] | None, /) -> TrainingSession:
        """Replace a failed session by one that continues from ``state``; None: from the beginning."""

    def on_checkpoint(self) -> None:
        """Called after each checkpoint, which belongs to the current plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """How often to save: by iterations or by time; with neither, at the end only."""

    iterations: int | None = None
    time_s: float | None = None


CHECKPOINT_EVERY = Interval(time_s=60.0)
"""Default interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Settings of the training loop."""

    limits: Limits
    seed: int
    max_unstable_share: float = 1.0
    """Largest share of environment steps that may become unstable; more end the run."""
    evaluation_interval: int = 0
    """Iterations between evaluations; 0: none."""
    evaluation_episodes: int = 10
    checkpoint_every: Interval = CHECKPOINT_EVERY

    @property
    def return_source(self) -> ReturnSource:
        """Which return ``stop_return`` and the best checkpoint refer to."""
        return "evaluation" if self.evaluation_interval > 0 else "training"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOutcome:
    """Result of a run."""

    stop: Stop | None
    """The limit reached; None if the run was interrupted."""
    position: Position
    checkpoint: str
    """Name of the last checkpoint."""
    best_return: float | None
