"""How much a larger batch still helps: the simple noise scale (McCandlish et al. 2018, "An Empirical Model of
Large-Batch Training", §2.2 and appendix A.1), counted in environments.

With a batch of N environments, reaching a return takes 1 + N / N_noise times the environment steps that tiny batches
would take. The unit is the environment and not the step, since the steps of one environment are not independent: a
minibatch holds the same number of steps of every environment, so N environments more make it proportionally larger.

What the estimate does not see: the scale grows while a policy improves (early probes overstate what a large batch costs);
the model supposes a step size that suits the batch, which ``kl_adaptive`` seeks and ``constant`` does not; and of PPO's
epochs it looks at the first, before the policy has moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.communicator import Communicator
from rayagi.algorithms.on_policy import OnPolicyBatch
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOUpdater
from rayagi.models.networks import ActorCritic

GROUPS = 8
"""Groups of environments whose gradients are compared with that of all."""


@dataclass(frozen=True, slots=True)
class NormPair:
    """Mean squared gradient norms of one iteration: over groups of environments, and over all of them."""

    small: float
    """Mean of the groups' squared norms."""
    big: float
    """Squared norm of the mean over all environments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseScale:
    """The noise scale of a task, early in learning."""

    num_envs: float
    """N_noise; a lower bound where it could not be resolved."""
    standard_error: float | None
    """Of num_envs, by leaving out one iteration at a time. None: the gradient could not be told from its noise."""
    iterations: int
    """Iterations that it was measured on."""

    def text(self) -> str:
        """As a sentence's part."""
        if self.standard_error is None:
            return f"at least {self.num_envs:.0f} environments (not resolved by {self.iterations} iterations)"
        return f"{self.num_envs:.0f} +- {self.standard_error:.0f} environments ({self.iterations} iterations)"


def noise_scale(pairs: Sequence[NormPair], *, small_envs: int, big_envs: int) -> NoiseScale:
    """N_noise = tr(Sigma) / |G|^2, numerator and denominator averaged over iterations before they are divided.

    Where |G|^2 is within two standard errors of zero, that upper end of it gives a lower bound of N_noise.

    Args:
        pairs: one per iteration
        small_envs: environments of a group
        big_envs: environments of all groups

    Raises:
        ValueError: fewer than two pairs, or groups as large as all.
    """
    count = len(pairs)
    if count < 2 or not 0 < small_envs < big_envs:
        raise ValueError(f"{count} pairs of {small_envs} and {big_envs} environments: 2 pairs are needed")
    signals = [(big_envs * pair.big - small_envs * pair.small) / (big_envs - small_envs) for pair in pairs]
    noises = [(pair.small - pair.big) / (1 / small_envs - 1 / big_envs) for pair in pairs]
    signal, noise = sum(signals), max(0.0, sum(noises))
    signal_error = math.sqrt(count * sum((each - signal / count) ** 2 for each in signals) / (count - 1))
    if signal <= 2 * signal_error:
        at_least = noise / (max(0.0, signal) + 2 * signal_error) if signal_error > 0 else 0.0
        return NoiseScale(num_envs=at_least, standard_error=None, iterations=count)
    ratios = [(noise - less) / (signal - own) for less, own in zip(noises, signals, strict=True)]
    mean = sum(ratios) / count
    error = math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in ratios))
    return NoiseScale(num_envs=noise / signal, standard_error=error, iterations=count)


def useful_steps_per_s(noise: NoiseScale, num_envs: int, steps_per_s: float) -> float:
    """Throughput divided by how many times more steps a batch of ``num_envs`` environments (of all GMIs) needs."""
    if noise.num_envs == 0:
        return steps_per_s / num_envs  # nothing but signal: every environment beyond the first is waste
    return steps_per_s / (1 + num_envs / noise.num_envs)


class GradientNoiseLearner(PPOUpdater):
    """A learner that, before each update, also compares the policy gradients of groups of environments."""

    def __init__(self, model: ActorCritic, spec: PPOSpec, communicator: Communicator, num_envs: int) -> None:
        super().__init__(model, spec, communicator)
        self.num_envs = num_envs
        self.pairs: list[NormPair] = []

    def update(
        self, batch: OnPolicyBatch, orders: Tensor, iteration: int, env_steps_total: int
    ) -> dict[str, float]:
        """Measure at the parameters that collected the batch, then update."""
        norms = torch.tensor([self._norms(batch, order) for order in orders[0]], dtype=torch.float64)
        small, big = norms.mean(0).tolist()
        self.pairs.append(NormPair(small=small, big=big))
        return super().update(batch, orders, iteration, env_steps_total)

    def _norms(self, batch: OnPolicyBatch, order: Tensor) -> tuple[float, float]:
        """Squared norms of one minibatch: mean over the groups, and of all environments together."""
        group = order % self.num_envs * GROUPS // self.num_envs
        gradients = torch.stack([self._policy_gradient(batch, order[group == g]) for g in range(GROUPS)])
        return float(gradients.square().sum(1).mean()), float(gradients.mean(0).square().sum())

    def _policy_gradient(self, batch: OnPolicyBatch, order: Tensor) -> Tensor:
        """Gradient of the loss in the policy's parameters alone: the value network is another one."""
        total, _ = self.loss(batch, order)
        parameters = [*self.model.policy.parameters(), *self.model.head.parameters()]
        return torch.cat([part.reshape(-1) for part in torch.autograd.grad(total, parameters)])
