"""APPO: epochs of minibatches on PPO's clipped loss, over rollouts of an older policy.

V-trace (Espeholt et al. 2018) corrects for the policy that acted; without it the samples count as on-policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.rollout import Rollout
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.gradient_updater import GradientUpdater
from rayagi.algorithms.ppo.learner import PPOUpdater, clipped_loss
from rayagi.algorithms.returns import explained_variance, gae, importance_metrics, vtrace
from rayagi.algorithms.rollout_learner import OnPolicyBatch, RolloutLearner


@dataclass(slots=True, kw_only=True)
class AppoBatch(OnPolicyBatch):
    """Samples of one rollout. ``log_probs`` are of the policy before this update; ``advantages`` and ``targets`` are
    estimated anew in every epoch, the former times V-trace's truncated importance ratio.

    Attributes:
        behaviour: log mu(a|s), under the behaviour policy           (B,)
        everything: obs, last states and final states, for V         (B + N + K, obs_dim)
        outcomes: rewards, terminated and done, as of ``RolloutLearner._outcomes``
    """

    behaviour: Tensor
    everything: Tensor
    outcomes: dict[str, Tensor]


class AppoUpdater(GradientUpdater[AppoSpec]):
    """Steps on PPO's clipped loss."""

    measured = PPOUpdater.measured


class AppoLearner(RolloutLearner[AppoSpec]):
    """The learner of APPO."""

    updater_class = AppoUpdater

    def _update(self, rollout: Rollout, orders: Tensor) -> dict[str, float]:
        updater, batch = self.updater, self.prepare(rollout)
        rows: list[Tensor] = []
        fits: list[float] = []
        for minibatches in orders:  # one epoch each: the targets follow the parameters
            fits.append(self.estimate(rollout, batch, first=not fits))
            rows += [self._step_on(batch, order) for order in minibatches]
        metrics = updater.end_update(
            rows, last_epoch=orders.shape[1], iteration=self.iteration + 1, what="APPO update"
        )
        bound = self.spec.rho_bar if self.spec.vtrace else None
        importance = importance_metrics(batch.log_probs - batch.behaviour, bound)
        return {**metrics, "explained_variance": fits[0], **importance}

    def _step_on(self, batch: AppoBatch, order: Tensor) -> Tensor:
        """One step on the samples in ``order``. Returns the updater's ``measured`` metrics, (6,)."""
        # The ratio of clipping and KL is relative to the policy before this update, not to the behaviour policy.
        total, parts = clipped_loss(self.policy.model, self.spec, batch, order)
        return torch.cat((parts, self.updater.step(total).reshape(1)))

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> AppoBatch:
        """The samples of a rollout, with log probabilities under behaviour policy and current policy."""
        obs, everything = self._observed(rollout)
        actions, memory = rollout.actions.flatten(0, 1).to(obs.device), self._memory(rollout)
        not_yet = torch.empty(0)
        return AppoBatch(
            obs=obs,
            actions=actions,
            behaviour=self._behaviour(rollout),
            log_probs=self._log_probs(obs, actions, memory),
            values=not_yet,
            advantages=not_yet,
            targets=not_yet,
            memory=memory,
            everything=everything,
            outcomes=self._outcomes(rollout),
        )

    @torch.no_grad()
    def estimate(self, rollout: Rollout, batch: AppoBatch, *, first: bool) -> float:
        """Set values, advantages and targets at the current parameters. Returns the values' explained variance.

        ``first``: the parameters are still those before the update.
        """
        spec = self.spec
        values, next_values = self._values(rollout, batch.everything)
        if spec.vtrace:
            # log (pi / mu) at the current parameters; in the first epoch pi is the policy before the update.
            now = batch.log_probs if first else self._log_probs(batch.obs, batch.actions, batch.memory)
            advantages, targets = vtrace(
                log_ratios=(now - batch.behaviour).view(values.shape),
                values=values,
                next_values=next_values,
                **batch.outcomes,
                gamma=spec.gamma,
                trace_lambda=spec.gae_lambda,
                rho_bar=spec.rho_bar,
                c_bar=spec.c_bar,
            )
            # rho = min(rho_bar, pi / mu). The clipped loss has its own ratio pi / pi_start; the remaining one is
            # pi_start / mu.
            weights = (batch.log_probs - batch.behaviour).exp().clamp(max=spec.rho_bar)
        else:
            advantages, targets = gae(
                values=values,
                next_values=next_values,
                **batch.outcomes,
                gamma=spec.gamma,
                gae_lambda=spec.gae_lambda,
            )
            weights = torch.ones_like(batch.log_probs)
        batch.values, batch.targets = values.reshape(-1), targets.reshape(-1)
        batch.advantages = self._normalised(advantages).reshape(-1) * weights
        return float(explained_variance(values, targets))
