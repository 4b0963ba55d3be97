"""SAC's update: a step on the critics, then on the policy, then on the temperature (Haarnoja et al. 2018)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from rayagi.algorithms.maximum_entropy import MaximumEntropyUpdater
from rayagi.algorithms.off_policy import OffPolicyLearner
from rayagi.algorithms.sac import SACSpec
from rayagi.algorithms.transitions import Transitions
from rayagi.config.spec import NetworkSpec
from rayagi.models.actor_q import ActorQ
from rayagi.models.exploring_heads import StateSquashedGaussianHead


def make_model(info: EnvInfo, network: NetworkSpec, spec: SACSpec, seed: int) -> ActorQ:
    """A policy whose standard deviation depends on the state, and twin critics."""
    head = StateSquashedGaussianHead(info.action.low, info.action.high)
    return ActorQ(info, network, head, seed=seed)


class SACUpdater(MaximumEntropyUpdater[SACSpec]):
    """Steps the twin critics, the policy and the temperature."""

    measured = ("policy_loss", "value_loss", "entropy", "grad_norm", "q_mean", "alpha")

    def __init__(self, model: ActorQ, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        rate = self.spec.learning_rate
        self.critics = self._group("critics", model.critics, self.spec.critic_learning_rate or rate)
        self.policy = self._group("policy", model.policy, rate)
        self.target = self._target("critics", model.critics, self.critics)

    def step(self, batch: Transitions) -> Tensor:
        """One gradient step on each network, in the papers' order."""
        alpha = self.temperature.log_alpha.detach().exp()
        value_loss, q_mean, norm = self._step_critics(batch, alpha)
        policy_loss, log_probs = self._step_policy(batch.obs, alpha)
        self._step_temperature(log_probs)
        self.follow(self.spec.tau)
        return torch.stack((policy_loss, value_loss, -log_probs, norm, q_mean, alpha))

    def _step_critics(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """J(Q) = sum_i E[(Q_i(s, a) - y)^2] / 2. Returns J, the mean of Q, and the gradient norm."""
        with torch.no_grad():
            # y = r + discount (min_i Q'_i(s', a') - alpha log pi(a'|s')), a' ~ pi(s').
            next_actions, next_log_probs = self._sample(batch.next_obs)
            q = self.target.module(batch.next_obs, next_actions).squeeze(-1)
            y = torch.addcmul(batch.rewards, batch.discounts, q.amin(0) - alpha * next_log_probs)
        trace = self.model.critics.traced(batch.obs, self.head.normalised(batch.actions))
        q = trace[-1].squeeze(-1)
        # dJ/dQ_i = (Q_i - y) / B.
        errors = q - y
        self.model.critics.backward(trace, (self.weight / len(y) * errors).unsqueeze(-1))
        norm = self.critics.step()
        return 0.5 * errors.square().sum(0).mean(), q.mean(), norm

    def _step_policy(self, obs: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """J(pi) = E[alpha log pi(a|s) - min_i Q_i(s, a)], a ~ pi(s). Returns J, and the mean of log pi."""
        actions, log_probs = self._sample(obs)
        trace = self.model.critics.traced(obs, actions.detach())
        q, least = trace[-1].min(0, keepdim=True)
        # dJ/da = -1 / B dQ_i/da of the lesser critic i, and dJ/d log pi = alpha / B.
        grads = torch.zeros_like(trace[-1]).scatter_(0, least, -self.weight / len(obs))
        of_actions = self.model.critics.action_gradients(trace, grads, self._dim)
        of_log_probs = (self.weight / len(obs) * alpha).expand_as(log_probs)
        self.policy.flat.gradients.zero_()
        torch.autograd.backward((actions, log_probs), (of_actions, of_log_probs))
        self.policy.step()
        log_probs = log_probs.detach()
        return (alpha * log_probs).mean() - q.mean(), log_probs.mean()


class SACLearner(OffPolicyLearner[SACSpec]):
    """The learner of SAC."""

    updater_class = SACUpdater
