"""Base of all learners: what is merged over trainers, so that all of them have the same parameters and statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic

from actors.protocols import StateDict
from actors.rollout import Rollout
from collectives.communicator import Communicator
from collectives.statistics import Moments, all_merge
from rayagi.algorithms.gradient_updater import SpecT, timed_collective
from rayagi.algorithms.normalisers import ObservationNormaliser, RewardScaler
from rayagi.models.policy import NetworkPolicy


class MergedLearner(ABC, Generic[SpecT]):
    """The trainers of a run, seen from one of them. Implements actors.roles.Learner but for the update and its state."""

    def __init__(
        self,
        *,
        policy: NetworkPolicy,
        spec: SpecT,
        communicator: Communicator,
        num_envs: int,
        first_env_index: int,
        total_envs: int,
        seed: int,
        total_env_steps: int | None,
    ) -> None:
        """``num_envs``: environments whose samples this trainer gets; ``total_envs``: those of all trainers together."""
        self.policy, self.spec, self.communicator = policy, spec, communicator
        self.num_envs, self.first_env_index, self.seed = num_envs, first_env_index, seed
        self.total_envs, self.total_env_steps = total_envs, total_env_steps
        self.sync_s = 0.0
        self.histograms: Mapping[str, Sequence[int]] = {}
        self.env_steps = 0
        """Environment steps of all GMIs so far, for schedules. Counted: a resumed run may have another number of
        environments, and free-running learners drop some (rayagi.algorithms.learning)."""

    def set_envs_of_update(self, num_envs: int, total_envs: int) -> None:
        """Set whose samples the next update gets, of this trainer and of all: a round lacks those of lost collectors."""
        self.total_envs = total_envs

    @abstractmethod
    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Update on one rollout. Returns metrics named in the catalogue."""

    def _merge(
        self, moments: Moments, statistics: ObservationNormaliser | RewardScaler | None = None
    ) -> Moments:
        """Merge moments over all trainers, and add them to running statistics: all get the same result."""
        if self.communicator.world_size > 1:
            with timed_collective(self, "all_merge"):
                moments = all_merge(moments, self.communicator)
        if statistics is not None:
            statistics.update(moments)
        return moments

    def _merge_observed(self, rollout: Rollout) -> None:
        """Add a rollout's observations to the running statistics, if they are normalised."""
        if self.policy.normaliser is not None:
            batch = self.policy.normaliser.moments_of(rollout.raw_obs).to("cpu")
            self._merge(batch, self.policy.normaliser)

    def refresh(self) -> None:
        """Take over what other trainers changed since the last update: nothing, where all step alike."""

    def shared_state(self) -> StateDict:
        """State that is equal on all replicas: environment steps, and observation statistics."""
        state: StateDict = {"env_steps": self.env_steps}
        if self.policy.normaliser is not None:
            state["obs_normaliser"] = self.policy.normaliser.state_dict()
        return state

    def local_state(self) -> StateDict:
        """State of this GMI's environments."""
        return {}

    def save_replay(self, folder: Path) -> bool:
        """Write this GMI's replay into a new folder. Returns False where there is none."""
        return False

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state; without ``local``, this GMI's own state is reset."""
        self.env_steps = int(shared["env_steps"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(shared["obs_normaliser"])
