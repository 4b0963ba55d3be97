"""Base class of the offline learners: gradient steps on batches of timesteps that all GMIs draw together.

One gradient step, in order:

1. Draw B timesteps of the whole dataset: the same list on every GMI.
2. Each GMI computes the losses of those that are in its shard, and the gradient of their sum over B.
3. Sum the gradients over the GMIs: it is the gradient of the mean over the B timesteps, whatever their distribution.
4. Adam, on every GMI alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from actors.protocols import StateDict
from actors.replay import Subscription
from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import GradientUpdater, refuse_nonfinite, timed_collective
from rayagi.algorithms.parameter_group import ParameterGroups
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import NetworkSpec
from rayagi.models.policy import NetworkPolicy
from rayagi.native.denormals import flushed_denormals

Batch = Mapping[str, Tensor]
"""Timesteps of this GMI's shard, (n, ...) each, by column: obs and next_obs normalised; 0 <= n <= B."""
TRANSITIONS = (
    Subscription(column="obs"),
    Subscription(column="action"),
    Subscription(column="reward"),
    Subscription(column="obs", offset=1, name="next_obs"),
    Subscription(column="terminated"),
)
"""What algorithms with critics take of the dataset."""
OfflineSpecT = TypeVar("OfflineSpecT", bound=OfflineSpec)


class OfflineLearner(ABC, Generic[OfflineSpecT]):
    """Trains the policy's own model, and other networks beside it. Equal on all GMIs after every step."""

    measured: ClassVar[tuple[str, ...]]
    """Metrics of a step, as named in rayagi.monitoring.catalogue; means over timesteps."""
    subscriptions: ClassVar[tuple[Subscription, ...]]
    """What a batch has, of the columns of rayagi.algorithms.offline_data."""

    def __init__(
        self,
        *,
        policy: NetworkPolicy,
        spec: OfflineSpecT,
        network: NetworkSpec,
        seed: int,
        communicator: Communicator,
    ) -> None:
        """Collective. ``network``: sizes of further networks, whose initial weights depend on ``seed`` alone."""
        self.policy, self.spec, self.communicator = policy, spec, communicator
        self.network, self.seed = network, seed
        self.updater = self._make_updater()
        self.sync_s = 0.0
        """Seconds in collectives during the last ``learn``, drawing not included."""

    @abstractmethod
    def _make_updater(self) -> GradientUpdater[Any] | ParameterGroups:
        """Make what holds the networks and their optimisers. Collective."""

    @property
    def _share(self) -> float:
        """Weight of a timestep in the mean over the batch of all GMIs."""
        return 1.0 / self.spec.batch_size

    @abstractmethod
    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One gradient step. Returns this GMI's part of the means of ``measured`` (metrics,), and the gradient's norm ()."""

    def learn(self, batches: Iterator[Batch], number: int) -> dict[str, float]:
        """Step on each batch. Denormals are flushed to zero meanwhile.

        Args:
            batches: this GMI's part of each
            number: of this iteration, from 1; for error messages

        Returns:
            Metrics over the timesteps of all GMIs.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite; the parameters must not be saved.
        """
        self.sync_s = 0.0
        self.updater.begin_update()
        with flushed_denormals():
            rows = [torch.cat((parts, norm.reshape(1))) for parts, norm in map(self.step, batches)]
        totals = torch.stack(rows).double().mean(0).cpu()
        norm = float(totals[-1])  # of the reduced gradient: equal on all GMIs
        with timed_collective(self, "all_reduce"):
            self.communicator.all_reduce(totals, "sum")
        self.sync_s += self.updater.sync_s
        metrics = {**dict(zip(self.measured, totals[:-1].tolist(), strict=True)), "grad_norm": norm}
        refuse_nonfinite(metrics, number, "gradient steps on the dataset")
        return {
            **metrics,
            "learning_rate": self.spec.learning_rate,
            "action_std": self.policy.model.head.spread(),
        }

    def shared_state(self) -> StateDict:
        """Updater state, and the statistics of the dataset's observations."""
        state: StateDict = {"learner": self.updater.state_dict()}
        if self.policy.normaliser is not None:
            state["obs_normaliser"] = self.policy.normaliser.state_dict()
        return state

    def load_state(self, shared: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self.updater.load_state_dict(shared["learner"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(shared["obs_normaliser"])


class OneLossLearner(OfflineLearner[OfflineSpecT]):
    """A learner whose networks are stepped along the gradient of one loss."""

    updater: GradientUpdater[OfflineSpecT]

    def _make_updater(self) -> GradientUpdater[OfflineSpecT]:
        return GradientUpdater(self.policy.model, self.spec, self.communicator)

    @abstractmethod
    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of each timestep: the loss (n,), and the metrics of ``measured`` (n, metrics)."""

    def after_step(self) -> None:
        """Called after every step of the optimiser."""

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As of ``OfflineLearner``."""
        loss, metrics = self.losses(batch)
        # The updater takes the mean over GMIs: sum_g (G / B sum_g loss) / G = the sum over all timesteps / B.
        norm = self.updater.step(self.communicator.world_size * self._share * loss.sum())
        self.after_step()
        return self._share * metrics.sum(0), norm.to(metrics)
