"""FastTD3's update: TD3 with distributional critics and AdamW, without a target policy (Seo et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayagi.algorithms.categorical import cross_entropy
from rayagi.algorithms.fast_td3 import FastTD3Spec
from rayagi.algorithms.fast_td3.model import FastTD3Model
from rayagi.algorithms.off_policy import OffPolicyLearner, OffPolicyUpdater
from rayagi.algorithms.parameter_group import ParameterGroup
from rayagi.algorithms.transitions import Transitions


class FastTD3Updater(OffPolicyUpdater[FastTD3Spec]):
    """Steps the twin critics, and with every ``policy_delay``-th step the policy."""

    measured = ("value_loss", "policy_loss", "grad_norm", "q_mean")
    model: FastTD3Model

    def __init__(self, model: FastTD3Model, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        spec = self.spec
        self.critics = self._group("critics", model.critics, spec.critic_learning_rate or spec.learning_rate)
        self.policy = self._group("policy", model.policy, spec.learning_rate)
        self.target = self._target("critics", model.critics, self.critics)
        self._policy_loss = torch.zeros((), device=self.device)

    def step(self, batch: Transitions) -> Tensor:
        """One gradient step on the critics, then perhaps on the policy, then Polyak averaging."""
        value_loss, norm, q_mean = self._step_critics(batch)
        if (self.steps + 1) % self.spec.policy_delay == 0:
            self._policy_loss = self._step_policy(batch.obs)
        self.follow(self.spec.tau)
        return torch.stack((value_loss, self._policy_loss, norm, q_mean))

    def _step_critics(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of both critics' cross entropies. Returns it, the gradient norm and the mean of E[Z]."""
        m = self._targets(batch)
        trace = self.model.critics.traced(batch.obs, batch.actions)
        log_p = trace[-1].log_softmax(-1)  # (2, B, num_atoms)
        p = log_p.exp()
        # L = -sum over critics k of E[sum_i m_ki log p_ki(s, a)]; dL/dlogits_k = (p_k - m_k) / B.
        self.model.critics.backward(trace, self.weight / len(batch.obs) * (p - m))
        norm = self._step_decayed(self.critics)
        return cross_entropy(m, log_p).mean(1).sum(), norm, self.model.support.expectation(p).mean()

    @torch.no_grad()
    def _targets(self, batch: Transitions) -> Tensor:
        """Projected distributions of r + discount Z'(s', a') for each critic, (2 or 1, B, num_atoms)."""
        spec, support = self.spec, self.model.support
        # a' = clip(pi(s') + clip(noise, -c, c), -1, 1), of the current policy: there is no target policy.
        modes = self.model.head.mode(self.model.policy(batch.next_obs))
        noise = torch.randn(modes.shape, generator=self.generator, device=self.device) * spec.target_noise
        actions = (modes + noise.clamp(-spec.target_noise_clip, spec.target_noise_clip)).clamp(-1.0, 1.0)
        p = self.target.module(batch.next_obs, actions).softmax(-1)
        m = torch.stack([support.project(each, batch.rewards, batch.discounts) for each in p])
        if not spec.clipped_double:
            return m
        # Clipped double Q: both learn from the distribution of the lower mean.
        first, second = support.expectation(m)
        return torch.where((first < second).unsqueeze(-1), m[0], m[1]).unsqueeze(0)

    def _step_policy(self, obs: Tensor) -> Tensor:
        """J(pi) = -E[min_i E[Z_i(s, pi(s))]]; without the clip the mean over i."""
        critics, support = self.model.critics, self.model.support
        actions = self.model.head.mode(self.model.policy(obs))
        trace = critics.traced(obs, actions.detach())
        p = trace[-1].softmax(-1)
        q = support.expectation(p)  # (2, B)
        if self.spec.clipped_double:
            least, chosen = q.min(0, keepdim=True)
            share = torch.zeros_like(q).scatter_(0, chosen, 1.0)
        else:
            least, share = q.mean(0, keepdim=True), torch.full_like(q, 1 / len(q))
        # dE[Z]/dlogits_j = p_j (z_j - E[Z]).
        slopes = p * (support.atoms(p.device) - q.unsqueeze(-1))
        of_logits = -self.weight / len(obs) * share.unsqueeze(-1) * slopes
        self.policy.flat.gradients.zero_()
        actions.backward(critics.action_gradients(trace, of_logits, actions.shape[-1]))
        self._step_decayed(self.policy)
        return -least.mean()

    def _step_decayed(self, group: ParameterGroup) -> Tensor:
        """One step of AdamW: parameters shrink by learning rate times decay, then Adam's step. Returns the gradient norm."""
        with torch.no_grad():
            group.flat.parameters.mul_(1.0 - float(group.adam.learning_rate) * self.spec.weight_decay)
        return group.step()


class FastTD3Learner(OffPolicyLearner[FastTD3Spec]):
    """Implements actors.roles.Learner for FastTD3. It acts with its policy from the first step."""

    def _make_updater(self, weight: float) -> FastTD3Updater:
        model = self.policy.model
        assert isinstance(model, FastTD3Model)
        return FastTD3Updater(model, self.spec, self.communicator, self.policy.info, weight=weight)

    def _set_warm_up(self) -> None:
        """No uniform actions: learning starts after a few steps of each environment."""
