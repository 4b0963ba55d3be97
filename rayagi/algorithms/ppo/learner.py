"""PPO's update: epochs of minibatch steps on the clipped surrogate (Schulman et al. 2017, algorithm 1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayagi.algorithms import losses
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.rollout_learner import OnPolicyBatch, OnPolicyLearner, OnPolicyUpdater
from rayagi.models.heads import GaussianHead
from rayagi.models.networks import ActorCritic, Model
from rayagi.native.learning import CompiledGradient, Trained


def clipped_loss(
    model: Model,
    spec: PPOSpec | AppoSpec,
    batch: OnPolicyBatch,
    order: Tensor,
    value_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Total loss of the samples in ``order``, and (policy_loss, value_loss, entropy, approx_kl, clip_fraction)."""
    outputs, values = model(batch.obs[order], batch.sequences(order))
    # log r = log pi(a|s) - log pi_old(a|s).
    log_ratio = model.head.log_prob(outputs, batch.actions[order]) - batch.log_probs[order]
    policy_loss = losses.clipped_policy_loss(log_ratio, batch.advantages[order], spec.clip_ratio)
    value_loss = losses.value_loss(values, batch.values[order], batch.targets[order], value_clip)
    entropy = model.head.entropy(outputs)
    # Eq. 9, negated: L = L^CLIP + c1 L^VF - c2 S.
    total = policy_loss + spec.value_coef * value_loss - spec.entropy_coef * entropy
    with torch.no_grad():
        kl, clipped = losses.approx_kl(log_ratio), losses.clip_fraction(log_ratio, spec.clip_ratio)
        parts = torch.stack((policy_loss.detach(), value_loss.detach(), entropy.detach(), kl, clipped))
    return total, parts


class PPOUpdater(OnPolicyUpdater[PPOSpec]):
    """Steps on the clipped surrogate and the value loss; on a CPU in a compiled C kernel, if a compiler is present."""

    measured = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")

    def __init__(self, *given: Any, **whose: Any) -> None:
        super().__init__(*given, **whose)
        self._compiled = self._compile()

    def update(self, batch: OnPolicyBatch, orders: Tensor, iteration: int) -> dict[str, float]:
        """All epochs over one rollout."""
        if self._compiled is not None:
            rows = self._compiled_steps(self._compiled, batch, orders)
        else:
            rows = [self.minibatch_step(batch, order) for epoch in orders for order in epoch]
        return self.end_update(rows, last_epoch=orders.shape[1], iteration=iteration, what="PPO update")

    def _compiled_steps(
        self, compiled: CompiledGradient, batch: OnPolicyBatch, orders: Tensor
    ) -> list[Tensor]:
        """``minibatch_step`` for all epochs, in the compiled kernel."""
        rows = []
        with compiled.minibatches(batch.fields(), self.weight) as minibatches:
            for order in orders.flatten(0, 1):
                parts = minibatches.gradient(order)
                rows.append(torch.cat((parts, self.apply_gradients(minibatches.pool).reshape(1))))
        return rows

    @torch.no_grad()
    def values(self, observed: Tensor) -> Tensor:
        """V(s): (B, obs_dim) -> (B,), in the compiled kernel if there is one."""
        return super().values(observed) if self._compiled is None else self._compiled.values(observed)

    def loss(self, batch: OnPolicyBatch, order: Tensor) -> tuple[Tensor, Tensor]:
        """As of ``clipped_loss``."""
        return clipped_loss(self.model, self.spec, batch, order, self.spec.value_clip)

    def minibatch_step(self, batch: OnPolicyBatch, order: Tensor) -> Tensor:
        """One step on the samples in ``order``, with torch. Returns the metrics of ``measured``, (6,)."""
        total, parts = self.loss(batch, order)
        norm = self.step(total)
        return torch.cat((parts, norm.reshape(1)))

    def _compile(self) -> CompiledGradient | None:
        """The compiled kernel; None on a GPU, for a model that it does not support, or without a compiler."""
        model, spec = self.model, self.spec
        if not model.fits_kernels or self._optimizer_step is None:
            return None
        assert isinstance(model, ActorCritic)
        return CompiledGradient(
            self._optimizer_step.library,
            Trained(
                policy=_linear(model.policy),
                value=_linear(model.value),
                activation=model.activation,
                log_std=model.head.log_std if isinstance(model.head, GaussianHead) else None,
                clip_ratio=spec.clip_ratio,
                value_clip=spec.value_clip,
                value_coef=spec.value_coef,
                entropy_coef=spec.entropy_coef,
            ),
        )


class PPOLearner(OnPolicyLearner[PPOSpec]):
    """The learner of PPO."""

    updater_class = PPOUpdater
    updater: PPOUpdater


def _linear(network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight, layer.bias) for layer in network.children() if isinstance(layer, nn.Linear)]
