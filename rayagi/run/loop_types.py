"""What the training loop needs, is told and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from actors.protocols import EvaluationResult, IterationResult
from placement.errors import SliceLostError
from rayagi.run.limits import Limits, Position, ReturnSource, Stop


class TrainingSession(Protocol):
    """What the loop needs of rayagi.coordinator's Session."""

    def submit(self, num_iterations: int, /) -> Any:
        """Ask every GMI for iterations, without waiting."""
        ...

    def collect(self) -> list[IterationResult]:
        """Wait for what was submitted; one merged result per iteration."""
        ...

    def evaluate(self, num_episodes: int, *, seed: int) -> EvaluationResult:
        """Run whole episodes without learning."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """``{"shared", "local", "num_gmis"}``."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on from a saved state."""
        ...


class HealthMonitor(Protocol):
    """What watches the GMIs for the loop, and may give it another session (rayagi.coordinator.health_monitor)."""

    def check_health(self, position: Position, /) -> None:
        """Judge what was collected last."""
        ...

    @property
    def replan_pending(self) -> bool:
        """Whether the loop is to go on in another session, once it has saved."""
        ...

    def replan(self, state: Mapping[str, Any], /) -> TrainingSession:
        """End the session, and open one by the new plan that goes on from ``state``."""
        ...

    def recover(self, lost: SliceLostError, state: Mapping[str, Any] | None, /) -> TrainingSession:
        """Open another session in the place of one that ended, which goes on from ``state``; None: from the beginning."""
        ...

    def on_checkpoint(self) -> None:
        """A checkpoint was written: it is of the present plan."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """How often to save: by iterations or by time; with neither, at the end only."""

    iterations: int | None = None
    time_s: float | None = None


CHECKPOINT_EVERY = Interval(time_s=60.0)
"""Where nobody says how often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """What the loop is told."""

    limits: Limits
    seed: int
    max_unstable_share: float = 1.0
    """Of environment steps; more unstable simulations end the run."""
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
    """How a run ended."""

    stop: Stop | None
    """The limit reached; None where it was interrupted."""
    position: Position
    checkpoint: str
    """Name of the last checkpoint."""
    best_return: float | None
