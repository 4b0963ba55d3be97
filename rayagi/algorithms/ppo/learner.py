"""The PPO learner: minibatches over epochs (Schulman et al. 2017)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayagi.algorithms import losses
from rayagi.algorithms.on_policy import OnPolicyBatch, OnPolicyLearner, OnPolicyUpdater
from rayagi.algorithms.ppo import PPOSpec
from rayagi.models.heads import GaussianHead
from rayagi.native.ppo import CompiledUpdate, Trained

MEASURED = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""What a step measures, in its order."""


class PPOUpdater(OnPolicyUpdater[PPOSpec]):
    """Clipped surrogate and value loss, step by step: on a CPU in a compiled program, where there is a compiler."""

    def __init__(self, *given: Any, **whose: Any) -> None:
        super().__init__(*given, **whose)
        self._compiled = self._compile()

    def update(
        self, batch: OnPolicyBatch, orders: Tensor, iteration: int, env_steps_total: int
    ) -> dict[str, float]:
        """All epochs over one rollout."""
        self.begin_update(env_steps_total)
        if self._compiled is not None:
            told, waited_s = self._compiled(batch.fields(), orders.flatten(0, 1), self.learning_rate)
            self.sync_s += waited_s
            rows = list(told)
        else:
            rows = [self.minibatch_step(batch, order) for epoch in orders for order in epoch]
        return self.end_update(
            MEASURED, rows, last_epoch=orders.shape[1], iteration=iteration, what="PPO update"
        )

    @torch.no_grad()
    def values(self, observed: Tensor) -> Tensor:
        """V(s): (B, obs_dim) -> (B,), by the program that learns, where there is one."""
        return super().values(observed) if self._compiled is None else self._compiled.values(observed)

    def loss(self, batch: OnPolicyBatch, order: Tensor) -> tuple[Tensor, Tensor]:
        """Total loss of the samples in ``order``, and (policy_loss, value_loss, entropy, approx_kl, clip_fraction)."""
        spec, model = self.spec, self.model
        obs = batch.obs[order]
        outputs = model.policy(obs)
        log_ratio = model.head.log_prob(outputs, batch.actions[order]) - batch.log_probs[order]
        policy_loss = losses.clipped_policy_loss(log_ratio, batch.advantages[order], spec.clip_ratio)
        value_loss = losses.value_loss(
            model.values(obs), batch.values[order], batch.targets[order], spec.value_clip
        )
        entropy = model.head.entropy(outputs)
        total = policy_loss + spec.value_coef * value_loss - spec.entropy_coef * entropy
        with torch.no_grad():
            kl, clipped = losses.approx_kl(log_ratio), losses.clip_fraction(log_ratio, spec.clip_ratio)
            parts = torch.stack((policy_loss.detach(), value_loss.detach(), entropy.detach(), kl, clipped))
        return total, parts

    def minibatch_step(self, batch: OnPolicyBatch, order: Tensor) -> Tensor:
        """One step on the samples in ``order``, by torch. Returns what ``MEASURED`` names, (6,)."""
        total, parts = self.loss(batch, order)
        norm = self.step(total)
        return torch.cat((parts, norm.reshape(1)))

    def _compile(self) -> CompiledUpdate | None:
        """None on a GPU, for a model that the compiled program does not know, and where there is no compiler."""
        model, spec = self.model, self.spec
        if not model.fits_kernels or self._optimizer_step is None:
            return None
        return CompiledUpdate(
            Trained(
                policy=_linear(model.policy),
                value=_linear(model.value),
                activation=model.activation,
                log_std=model.head.log_std if isinstance(model.head, GaussianHead) else None,
                clip_ratio=spec.clip_ratio,
                value_clip=spec.value_clip,
                value_coef=spec.value_coef,
                entropy_coef=spec.entropy_coef,
                weight=self.weight,
            ),
            self._optimizer_step,
        )


class PPOLearner(OnPolicyLearner[PPOSpec]):
    """Implements actors.trainer.Learner for PPO."""

    updater: PPOUpdater

    def _make_updater(self, total_env_steps: int | None, weight: float) -> PPOUpdater:
        return PPOUpdater(self.policy.model, self.spec, self.communicator, total_env_steps, weight=weight)


def _linear(network: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight, layer.bias) for layer in network if isinstance(layer, nn.Linear)]
