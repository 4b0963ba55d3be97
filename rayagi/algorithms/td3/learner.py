"""TD3's update: a step on the critics and, every ``policy_delay`` of them, on the policy (Fujimoto et al. 2018).

The policy's loss may have a cloning term with a weight that decays: TD3+BC, continued online (Beeson and Montana 2022).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from rayagi.algorithms.gradient_updater import timed_collective
from rayagi.algorithms.off_policy import OffPolicyLearner, OffPolicyUpdater
from rayagi.algorithms.td3 import TD3Spec
from rayagi.algorithms.transitions import Transitions
from rayagi.config.spec import NetworkSpec
from rayagi.models.actor_q import ActorQ
from rayagi.models.exploring_heads import DeterministicHead


def make_model(info: EnvInfo, network: NetworkSpec, spec: TD3Spec, seed: int) -> ActorQ:
    """A deterministic policy, and twin critics."""
    head = DeterministicHead(info.action.low, info.action.high, spec.exploration_noise)
    return ActorQ(info, network, head, seed=seed)


class TD3Updater(OffPolicyUpdater[TD3Spec]):
    """Steps the twin critics and the policy (algorithm 1)."""

    measured = ("policy_loss", "value_loss", "grad_norm", "q_mean")
    model: ActorQ

    def __init__(self, model: ActorQ, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        spec = self.spec
        rate = spec.critic_learning_rate or spec.learning_rate
        self.critics = self._group("critics", model.critics, rate)
        self.policy = self._group("policy", model.policy, spec.learning_rate)
        self.target_critics = self._target("critics", model.critics, self.critics)
        self.target_policy = self._target("policy", model.policy, self.policy)
        self._policy_loss = torch.zeros((), device=self.device)
        """Of the last step of the policy."""
        self.cloning = spec.cloning
        """Weight of the cloning term now."""

    def step(self, batch: Transitions) -> Tensor:
        """One step of the critics; every ``policy_delay`` of them one of the policy and of all targets."""
        value_loss, q_mean, norm = self._step_critics(batch)
        if (self.steps + 1) % self.spec.policy_delay == 0:
            self._policy_loss = self._step_policy(batch)
            self.follow(self.spec.tau)
        return torch.stack((self._policy_loss, value_loss, norm, q_mean))

    def _step_critics(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """sum_i E[(Q_i(s, a) - y)^2]. Returns it, the mean of Q, and the gradient norm."""
        spec = self.spec
        with torch.no_grad():
            # a' = clip(pi'(s') + clip(noise, -c, c), -1, 1); y = r + discount min_i Q'_i(s', a').
            noise = (spec.target_noise * self.noise(batch.actions.shape)).clamp(
                -spec.target_noise_clip, spec.target_noise_clip
            )
            next_actions = (self.target_policy.module(batch.next_obs).tanh() + noise).clamp(-1, 1)
            q = self.target_critics.module(batch.next_obs, next_actions).squeeze(-1)
            y = torch.addcmul(batch.rewards, batch.discounts, q.amin(0))
        trace = self.model.critics.traced(batch.obs, batch.actions)
        q = trace[-1].squeeze(-1)
        # The derivative by Q_i is 2 (Q_i - y) / B.
        errors = q - y
        self.model.critics.backward(trace, (2 * self.weight / len(y) * errors).unsqueeze(-1))
        norm = self.critics.step()
        return errors.square().sum(0).mean(), q.mean(), norm

    def _step_policy(self, batch: Transitions) -> Tensor:
        """The deterministic policy gradient, of -E[Q_1(s, pi(s))] and, if asked for, a cloning term. Returns this loss."""
        actions = self.model.policy(batch.obs).tanh()
        trace = self.model.critics.traced(batch.obs, actions.detach())
        q = trace[-1][0]
        factor = self._one_over_size(q) if self.cloning else 1.0
        grads = torch.zeros_like(trace[-1])
        grads[0] = -self.weight * factor / len(q)
        of_actions = self.model.critics.action_gradients(trace, grads, actions.shape[-1])
        loss = -factor * q.mean()
        if self.cloning:
            # + w E[|pi(s) - a|^2 / dim], whose derivative by pi(s) is 2 w (pi(s) - a) / (B dim).
            errors = actions.detach() - batch.actions
            of_actions += 2 * self.cloning * self.weight / errors.numel() * errors
            loss += self.cloning * errors.square().mean()
        self.policy.flat.gradients.zero_()
        actions.backward(of_actions)
        self.policy.step()
        return loss

    def _one_over_size(self, q: Tensor) -> Tensor:
        """1 / E|Q| over the batch of all trainers, (): the cloning term's weight does not depend on the scale of rewards."""
        size = self.weight * q.abs().mean()
        if self.communicator.world_size > 1:
            reduced = size.reshape(1).cpu()
            with timed_collective(self.policy, "all_reduce"):
                self.communicator.all_reduce(reduced, "mean")
            size = reduced[0].to(q)
        return 1.0 / size.clamp(min=1e-8)

    def noise(self, shape: torch.Size) -> Tensor:
        """Standard normal noise for the target policy's actions."""
        return torch.randn(shape, generator=self.generator, device=self.device)


class TD3Learner(OffPolicyLearner[TD3Spec]):
    """The learner of TD3."""

    updater_class = TD3Updater
    updater: TD3Updater

    def _steps_for(self, env_steps: int) -> list[Tensor]:
        """As of ``OffPolicyLearner``. The cloning term's weight is w_0 (w_end / w_0)^(t / T) after t environment steps."""
        spec = self.spec
        if spec.cloning:
            part = min(1.0, self.env_steps / spec.cloning_steps)
            self.updater.cloning = spec.cloning * (spec.cloning_end / spec.cloning) ** part
        return super()._steps_for(env_steps)
