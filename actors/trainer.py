"""The trainer role: turns a rollout into an update. The algorithm is given to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from actors.protocols import StateDict
from actors.rollout import Rollout


class Learner(Protocol):
    """An algorithm's side of the trainer: everything between a rollout and new parameters."""

    sync_s: float
    """Seconds in collectives during the last ``learn``, waiting included."""

    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Update on one rollout. Returns metrics named in the catalogue."""
        ...

    def shared_state(self) -> StateDict:
        """What all replicas hold alike."""
        ...

    def local_state(self) -> StateDict:
        """What belongs to this GMI's environments."""
        ...

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Go on from a saved state; without ``local``, this GMI's part starts anew."""
        ...


class Trainer:
    """Counts iterations and hands rollouts to the learner."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.iteration = 0
        """Updates made so far."""

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from one rollout. Returns the learner's metrics, and the seconds of updating and of collectives."""
        started = time.perf_counter()
        metrics = self.learner.learn(rollout, self.iteration)
        sync_s = self.learner.sync_s
        self.iteration += 1
        return {"update_s": time.perf_counter() - started - sync_s, "sync_s": sync_s, **metrics}

    def shared_state(self) -> StateDict:
        """What all replicas hold alike."""
        return {"iteration": self.iteration, **self.learner.shared_state()}

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Go on from a saved state."""
        self.iteration = int(shared["iteration"])
        self.learner.load_state(shared, local)
