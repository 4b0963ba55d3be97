"""FastSAC's update: SAC with distributional critics, AdamW and delayed steps of the policy (Seo et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from rayagi.algorithms.distributional_critics import (
    DistributionalActorQ,
    DistributionalLearner,
    DistributionalUpdater,
)
from rayagi.algorithms.fast_sac import FastSACSpec
from rayagi.algorithms.maximum_entropy import MaximumEntropyUpdater
from rayagi.algorithms.transitions import Transitions
from rayagi.config.spec import NetworkSpec
from rayagi.models.exploring_heads import SmoothlyBoundedGaussianHead

LOG_STD_RANGE = (-5.0, 0.0)
"""Of the policy's standard deviations."""


def make_model(info: EnvInfo, network: NetworkSpec, spec: FastSACSpec, seed: int) -> DistributionalActorQ:
    """A policy whose standard deviation depends on the state, and twin critics half as wide again."""
    head = SmoothlyBoundedGaussianHead(info.action.low, info.action.high, LOG_STD_RANGE)
    return DistributionalActorQ(info, network, head, spec, seed=seed, critic_width=1.5)


class FastSACUpdater(DistributionalUpdater[FastSACSpec], MaximumEntropyUpdater[FastSACSpec]):
    """Steps the twin critics and the temperature, and with every ``policy_delay``-th step the policy."""

    measured = ("policy_loss", "value_loss", "entropy", "grad_norm", "q_mean", "alpha")
    betas = (0.9, 0.95)
    model: DistributionalActorQ

    def __init__(self, model: DistributionalActorQ, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        self._policy_loss = torch.zeros((), device=self.device)
        """Of the last step of the policy."""
        self._next_log_prob = torch.zeros((), device=self.device)
        """Mean of log pi(a'|s') of this step's targets."""

    def step(self, batch: Transitions) -> Tensor:
        """One gradient step on the critics and the temperature, then perhaps on the policy, then Polyak averaging."""
        alpha = self.temperature.log_alpha.detach().exp()
        value_loss, norm, q_mean = self._step_critics(batch)
        self._step_temperature(self._next_log_prob)
        if (self.steps + 1) % self.spec.policy_delay == 0:
            self._policy_loss = self._step_policy(batch.obs)
        self.follow(self.spec.tau)
        return torch.stack((self._policy_loss, value_loss, -self._next_log_prob, norm, q_mean, alpha))

    def _next_actions(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """a' ~ pi(s'), and r - discount alpha log pi(a'|s'): of a terminated episode r alone."""
        actions, log_probs = self._sample(batch.next_obs)
        self._next_log_prob = log_probs.mean()
        alpha = self.temperature.log_alpha.exp()
        return actions, batch.rewards - batch.discounts * alpha * log_probs

    def _step_policy(self, obs: Tensor) -> Tensor:
        """J(pi) = E[alpha log pi(a|s) - mean_i E[Z_i(s, a)]], a ~ pi(s); with the clip the least over i."""
        actions, log_probs = self._sample(obs)
        q, of_actions = self._q_and_action_gradients(obs, actions)
        # dJ/da = of_actions, and dJ/d log pi = alpha / B.
        alpha = self.temperature.log_alpha.detach().exp()
        of_log_probs = (self.weight / len(obs) * alpha).expand_as(log_probs)
        self.policy.flat.gradients.zero_()
        torch.autograd.backward((actions, log_probs), (of_actions, of_log_probs))
        self._step_decayed(self.policy)
        return (alpha * log_probs.detach() - q).mean()


class FastSACLearner(DistributionalLearner[FastSACSpec]):
    """The learner of FastSAC."""

    updater_class = FastSACUpdater
