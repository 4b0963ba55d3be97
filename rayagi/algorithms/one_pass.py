"""Actor-critic with one gradient step per rollout, by RMSProp: what IMPALA and A3C have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from actors.protocols import StateDict
from rayagi.algorithms.rollout_learner import OnPolicyBatch, OnPolicyUpdater
from rayagi.config.learning import OnePassSpec


class RMSProp:
    """RMSProp without momentum, epsilon inside the root: Mnih et al. 2016, §4 (eq. 1), and TensorFlow's.

    torch.optim.RMSprop has epsilon outside. Tensors are updated in place; several processes may share them.
    """

    def __init__(
        self, parameters: Tensor, gradients: Tensor, square_avg: Tensor, *, decay: float, eps: float
    ) -> None:
        """Parameters, gradients and the running mean of squared gradients are flat, (count,) each."""
        self.parameters, self.gradients, self.square_avg = parameters, gradients, square_avg
        self.decay, self.eps, self.learning_rate = decay, eps, 0.0

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of later steps."""
        self.learning_rate = learning_rate

    @torch.no_grad()
    def step(self) -> None:
        """One step on the gradients."""
        d = self.gradients.to(self.parameters.device)
        # g = alpha g + (1 - alpha) d^2.
        self.square_avg.mul_(self.decay).addcmul_(d, d, value=1.0 - self.decay)
        # theta = theta - eta d / sqrt(g + eps).
        self.parameters.addcdiv_(d, (self.square_avg + self.eps).sqrt_(), value=-self.learning_rate)

    def state_dict(self) -> StateDict:
        """The running mean of squared gradients."""
        return {"square_avg": self.square_avg}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state in place."""
        self.square_avg.copy_(state["square_avg"])


OnePassT = TypeVar("OnePassT", bound=OnePassSpec)


class OnePassUpdater(OnPolicyUpdater[OnePassT]):
    """One step on policy gradient, value loss and entropy bonus, over all samples of a rollout."""

    measured = ("policy_loss", "value_loss", "entropy", "grad_norm")

    def _make_optimiser(self) -> RMSProp:
        flat, spec = self.flat, self.spec
        return RMSProp(
            flat.parameters.detach(),
            flat.gradients,
            torch.zeros_like(flat.gradients),
            decay=spec.rms_decay,
            eps=spec.rms_eps,
        )

    def update(self, batch: OnPolicyBatch, orders: Tensor, iteration: int) -> dict[str, float]:
        """The step on a rollout."""
        total, parts = self.loss(batch, orders[0, 0])
        row = torch.cat((parts, self.step(total).reshape(1)))
        return self.end_update([row], last_epoch=1, iteration=iteration, what="actor-critic update")

    def loss(self, batch: OnPolicyBatch, order: Tensor) -> tuple[Tensor, Tensor]:
        """Total loss of the samples in ``order``, and (policy_loss, value_loss, entropy)."""
        spec, model = self.spec, self.model
        outputs, values = model(batch.obs[order], batch.sequences(order))
        log_probs = model.head.log_prob(outputs, batch.actions[order])
        # Policy gradient A_t grad log pi(a_t|s_t); IMPALA's rho_t is already in the advantages.
        policy_loss = -(batch.advantages[order] * log_probs).mean()
        value_loss = (batch.targets[order] - values).square().mean()  # (v_t - V(s_t))^2
        entropy = model.head.entropy(outputs)
        total = policy_loss + spec.value_coef * value_loss - spec.entropy_coef * entropy
        return total, torch.stack((policy_loss, value_loss, entropy)).detach()
