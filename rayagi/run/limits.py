"""Limits of a run, the window of episodes that they look at, and the pure function that decides whether one is reached."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from placement.errors import counted
from rayagi.run.quantities import count_text, duration_text

WINDOW = 100
"""Episodes over which training returns are averaged."""


class EpisodeWindow:
    """Returns and lengths of the newest episodes."""

    def __init__(self, size: int = WINDOW) -> None:
        self.returns: deque[float] = deque(maxlen=size)
        self.lengths: deque[int] = deque(maxlen=size)
        self._size = size
        self._terms: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        return len(self.returns)

    def add(
        self,
        returns: Sequence[float],
        lengths: Sequence[int],
        reward_terms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Add the episodes of one iteration: their returns, lengths, and sums of each reward term."""
        for name, sums in (reward_terms or {}).items():
            self._terms.setdefault(name, deque(maxlen=self._size)).extend(sums)
        self.returns.extend(returns)
        self.lengths.extend(lengths)

    def return_mean(self) -> float | None:
        """Mean return; None before the first episode ended."""
        return sum(self.returns) / len(self.returns) if self.returns else None

    def length_mean(self) -> float | None:
        """Mean length in steps; None before the first episode ended."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else None

    def reward_term_means(self) -> dict[str, float]:
        """Mean episode sum of each reward term that has occurred."""
        return {name: sum(sums) / len(sums) for name, sums in self._terms.items() if sums}

    def to_dict(self) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed learning curve is continuous."""
        return {
            "returns": list(self.returns),
            "lengths": [float(length) for length in self.lengths],
            "reward_terms": {name: list(sums) for name, sums in self._terms.items()},
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        self.returns.clear()
        self.lengths.clear()
        self._terms.clear()
        lengths = [int(length) for length in stored["lengths"]]
        self.add(stored["returns"], lengths, stored.get("reward_terms"))


ReturnSource = Literal["evaluation", "training"]

DEFAULT_TIME_S = 600.0
"""Default training time, if neither the user nor the task's preset sets a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a run; the first one reached ends it. All count from the start of the run, resumed or not."""

    time_s: float | None = None
    """Training time: iterations, evaluations and checkpoints, without startup and shutdown of Ray."""
    env_steps: int | None = None
    """Environment steps of all GMIs."""
    iterations: int | None = None
    stop_return: float | None = None
    """Mean return that ends the run: of the evaluation if it is on, else of the last 100 training episodes, once there
    are that many."""

    def is_empty(self) -> bool:
        """Whether there is no limit."""
        return self == Limits()

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Limits:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{each.name: stored.get(each.name) for each in fields(cls)})

    def text(self, return_source: ReturnSource) -> str:
        """Readable text: ``5 min, or evaluation return >= 900``."""
        parts = []
        if self.time_s is not None:
            parts.append(f"{duration_text(self.time_s)} of training")
        if self.env_steps is not None:
            parts.append(f"{count_text(self.env_steps)} environment steps")
        if self.iterations is not None:
            parts.append(counted(self.iterations, "iteration"))
        if self.stop_return is not None:
            what = (
                "evaluation return"
                if return_source == "evaluation"
                else "mean return of the last 100 episodes"
            )
            parts.append(f"{what} >= {self.stop_return:g}")
        return ", or ".join(parts) if parts else "no limit; Ctrl-C ends it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Progress of a run."""

    iteration: int
    env_steps: int
    train_s: float
    evaluation_return: float | None
    """Return of the last evaluation; None before the first."""
    training_return: float | None
    """Mean of the last 100 episodes; None before the first episode ended."""
    training_episodes: int
    """Number of episodes in ``training_return``."""

    def settled_return(self, source: ReturnSource) -> float | None:
        """The return to base decisions on: of an evaluation, or of a full window of training episodes.

        The first episodes to end are short ones, so their mean is biased.
        """
        if source == "evaluation":
            return self.evaluation_return
        return self.training_return if self.training_episodes >= WINDOW else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A limit was reached."""

    limit: str
    """Name of the field of ``Limits``."""
    reason: str


def should_stop(limits: Limits, position: Position, return_source: ReturnSource) -> Stop | None:
    """The first limit that the run has reached; None if there is none."""
    if limits.iterations is not None and position.iteration >= limits.iterations:
        return Stop(limit="iterations", reason=f"{counted(position.iteration, 'iteration')} done")
    if limits.env_steps is not None and position.env_steps >= limits.env_steps:
        return Stop(limit="env_steps", reason=f"{position.env_steps:,} environment steps done")
    if limits.stop_return is not None:
        measured = position.settled_return(return_source)
        if measured is not None and measured >= limits.stop_return:
            return Stop(
                limit="stop_return",
                reason=f"{return_source} return {measured:.1f} reached {limits.stop_return:g}",
            )
    if limits.time_s is not None and position.train_s >= limits.time_s:
        return Stop(limit="time_s", reason=f"{duration_text(limits.time_s)} of training done")
    return None


def seconds_left(
    limits: Limits, position: Position, *, steps_per_s: float, iteration_s: float
) -> float | None:
    """Seconds to the nearest predictable limit; None if only a return ends the run."""
    left = []
    if limits.time_s is not None:
        left.append(limits.time_s - position.train_s)
    if limits.env_steps is not None and steps_per_s > 0:
        left.append((limits.env_steps - position.env_steps) / steps_per_s)
    if limits.iterations is not None and iteration_s > 0:
        left.append((limits.iterations - position.iteration) * iteration_s)
    return max(0.0, min(left)) if left else None


def iterations_until(
    limits: Limits, *, iteration: int, env_steps: int, steps_per_iteration: float
) -> int | None:
    """Iterations left until the step or iteration limit; None if neither is set."""
    left = []
    if limits.iterations is not None:
        left.append(limits.iterations - iteration)
    if limits.env_steps is not None and steps_per_iteration > 0:
        left.append(-int(-(limits.env_steps - env_steps) // steps_per_iteration))
    return max(0, min(left)) if left else None
