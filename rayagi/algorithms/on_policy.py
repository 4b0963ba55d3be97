"""Base of the on-policy learners (PPO, TRPO): advantages and value targets by GAE, then the algorithm's update."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.rollout import Rollout
from rayagi.algorithms.gradient_updater import GradientUpdater, SpecT
from rayagi.algorithms.returns import explained_variance, gae
from rayagi.algorithms.rollout_learner import RolloutLearner
from rayagi.models.recurrent import RolloutMemory, Sequences


@dataclass(slots=True)
class OnPolicyBatch:
    """Training samples of one rollout, flattened over time and environments: B = T * N.

    Attributes:
        obs: normalised observations                        (B, obs_dim)
        actions: actions taken                              (B, dim) or (B,)
        log_probs: log pi_old(a|s)                          (B,)
        values: V_old(s)                                    (B,)
        advantages: normalised if ``normalize_advantages``  (B,)
        targets: value targets                              (B,)
        memory: states of a recurrent policy; None: samples are independent
    """

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    targets: Tensor
    memory: RolloutMemory | None = None

    def sequences(self, order: Tensor) -> Sequences | None:
        """How the samples in ``order`` form sequences; None if they are independent."""
        return None if self.memory is None else self.memory.of(order)

    def fields(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of declaration."""
        return self.obs, self.actions, self.log_probs, self.values, self.advantages, self.targets


class OnPolicyUpdater(GradientUpdater[SpecT]):
    """Steps the networks on a batch."""

    @abstractmethod
    def update(
        self, batch: OnPolicyBatch, orders: Tensor, iteration: int, env_steps_total: int
    ) -> dict[str, float]:
        """Run all epochs over one rollout.

        Args:
            batch: this GMI's samples
            orders: flat sample indices of each minibatch, (num_epochs, num_minibatches, minibatch)
            iteration: number of this iteration, from 1; for error messages
            env_steps_total: steps of all GMIs before this update, for the linear schedule

        Returns:
            Metrics named in rayagi.monitoring.catalogue, averaged over minibatches.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite; the parameters must not be saved.
        """


class OnPolicyLearner(RolloutLearner[SpecT]):
    """Implements actors.roles.Learner for algorithms that learn from rollouts of the current policy."""

    updater: OnPolicyUpdater[SpecT]

    def _update(self, rollout: Rollout, orders: Tensor, number: int) -> dict[str, float]:
        batch, fit = self.prepare(rollout)
        metrics = self.updater.update(batch, orders, number, self.env_steps)
        return {**metrics, "explained_variance": float(fit)}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> tuple[OnPolicyBatch, Tensor]:
        """The batch of a rollout, and the explained variance of its value estimates, ()."""
        obs, everything = self._observed(rollout)
        values, next_values = self._values(rollout, everything)
        device = values.device
        advantages, targets = gae(
            rewards=self._scaled_rewards(rollout),
            values=values,
            next_values=next_values,
            terminated=rollout.terminated.to(device),
            done=(rollout.terminated | rollout.truncated).to(device),
            gamma=self.spec.gamma,
            gae_lambda=self.spec.gae_lambda,
        )
        return (
            OnPolicyBatch(
                obs=obs,
                actions=rollout.actions.flatten(0, 1).to(device),
                log_probs=self._behaviour(rollout),
                values=values.reshape(-1),
                advantages=self._normalised(advantages).reshape(-1),
                targets=targets.reshape(-1),
                memory=self._memory(rollout),
            ),
            explained_variance(values, targets),
        )
