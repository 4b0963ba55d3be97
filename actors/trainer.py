"""Trainer role: updates the policy from rollouts, with the learner of an algorithm."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from actors.protocols import StateDict
from actors.rollout import Rollout


class Learner(Protocol):
    """An algorithm's update: from a rollout to new parameters."""

    sync_s: float
    """Seconds in collectives during the last ``learn``, including waiting."""

    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Update on one rollout. Returns metrics named in the catalogue."""
        ...

    def shared_state(self) -> StateDict:
        """State that is equal on all replicas."""
        ...

    def local_state(self) -> StateDict:
        """State of this GMI's environments."""
        ...

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state; without ``local``, this GMI's own state is reset."""
        ...


class Trainer:
    """Passes rollouts to the learner and counts iterations."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.iteration = 0
        """Number of updates so far."""

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Learn from one rollout. Returns the learner's metrics, and the seconds of updating and of collectives."""
        started = time.perf_counter()
        metrics = self.learner.learn(rollout, self.iteration)
        sync_s = self.learner.sync_s
        self.iteration += 1
        return {"update_s": time.perf_counter() - started - sync_s, "sync_s": sync_s, **metrics}

    def shared_state(self) -> StateDict:
        """State that is equal on all replicas."""
        return {"iteration": self.iteration, **self.learner.shared_state()}

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state."""
        self.iteration = int(shared["iteration"])
        self.learner.load_state(shared, local)
