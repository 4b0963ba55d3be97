"""FastTD3's update: TD3 with distributional critics and AdamW, without a target policy (Seo et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayagi.algorithms.distributional_critics import DistributionalUpdater
from rayagi.algorithms.fast_td3 import FastTD3Spec
from rayagi.algorithms.fast_td3.model import FastTD3Model
from rayagi.algorithms.off_policy import OffPolicyLearner
from rayagi.algorithms.transitions import Transitions


class FastTD3Updater(DistributionalUpdater[FastTD3Spec]):
    """Steps the twin critics, and with every ``policy_delay``-th step the policy."""

    measured = ("value_loss", "policy_loss", "grad_norm", "q_mean")

    def __init__(self, model: FastTD3Model, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        self._policy_loss = torch.zeros((), device=self.device)
        """Of the last step of the policy."""

    def step(self, batch: Transitions) -> Tensor:
        """One gradient step on the critics, then perhaps on the policy, then Polyak averaging."""
        value_loss, norm, q_mean = self._step_critics(batch)
        if (self.steps + 1) % self.spec.policy_delay == 0:
            self._policy_loss = self._step_policy(batch.obs)
        self.follow(self.spec.tau)
        return torch.stack((value_loss, self._policy_loss, norm, q_mean))

    def _next_actions(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """a' = clip(pi(s') + clip(noise, -c, c), -1, 1), of the current policy: there is no target policy."""
        spec = self.spec
        modes = self.model.head.mode(self.model.policy(batch.next_obs))
        noise = torch.randn(modes.shape, generator=self.generator, device=self.device) * spec.target_noise
        noise = noise.clamp(-spec.target_noise_clip, spec.target_noise_clip)
        return (modes + noise).clamp(-1.0, 1.0), batch.rewards

    def _step_policy(self, obs: Tensor) -> Tensor:
        """J(pi) = -E[min_i E[Z_i(s, pi(s))]]; without the clip the mean over i."""
        actions = self.model.head.mode(self.model.policy(obs))
        q, of_actions = self._q_and_action_gradients(obs, actions)
        self.policy.flat.gradients.zero_()
        actions.backward(of_actions)
        self._step_decayed(self.policy)
        return -q.mean()


class FastTD3Learner(OffPolicyLearner[FastTD3Spec]):
    """Implements actors.roles.Learner for FastTD3. It acts with its policy from the first step."""

    def _make_updater(self, weight: float) -> FastTD3Updater:
        model = self.policy.model
        assert isinstance(model, FastTD3Model)
        return FastTD3Updater(model, self.spec, self.communicator, self.policy.info, weight=weight)

    def _set_warm_up(self) -> None:
        """No uniform actions: learning starts after a few steps of each environment."""
