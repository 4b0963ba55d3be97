"""From a raw rollout to PPO's batch: values, advantages; then the update."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.rollout import Rollout
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOBatch, PPOLearner
from rayagi.algorithms.returns import explained_variance, gae
from rayagi.algorithms.rollout_training import RolloutTraining


class PPOTraining(RolloutTraining[PPOSpec]):
    """Implements actors.trainer.Learner for PPO."""

    learner: PPOLearner

    def _make_learner(self, total_env_steps: int | None, weight: float) -> PPOLearner:
        return PPOLearner(self.policy.model, self.spec, self.communicator, total_env_steps, weight=weight)

    def _update(self, rollout: Rollout, orders: Tensor, number: int) -> dict[str, float]:
        batch, fit = self.prepare(rollout)
        metrics = self.learner.update(batch, orders, number, self.env_steps)
        return {**metrics, "explained_variance": float(fit)}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> tuple[PPOBatch, Tensor]:
        """PPO's batch of a rollout, and the explained variance of its value estimates, ()."""
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
            PPOBatch(
                obs=obs,
                actions=rollout.actions.flatten(0, 1).to(device),
                log_probs=self._behaviour(rollout),
                values=values.reshape(-1),
                advantages=self._normalised(advantages).reshape(-1),
                targets=targets.reshape(-1),
            ),
            explained_variance(values, targets),
        )
