"""Gradient noise scale: the batch size beyond which more samples help little, in environments.

It is the simple noise scale of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", §2.2 and appendix A.1.
With a batch of N environments, reaching a return takes 1 + N / N_noise times the environment steps of tiny batches. The
unit is the environment: steps of one environment are not independent, and a minibatch has equally many of each.

Limits of the estimate: the scale grows while the policy improves, so early probes overstate the cost of a large batch. The
model assumes a learning rate tuned to the batch, which ``kl_adaptive`` approximates and ``constant`` does not. Of PPO's
epochs, only the first is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.communicator import Communicator
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOUpdater
from rayagi.algorithms.rollout_learner import OnPolicyBatch
from rayagi.models.networks import Model

GROUPS = 8
"""Number of environment groups whose gradients are compared with the gradient over all environments."""


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
    """N_noise; a lower bound where ``standard_error`` is None."""
    standard_error: float | None
    """Jackknife standard error of num_envs over iterations. None: the gradient is within its noise."""
    iterations: int
    """Number of measured iterations."""

    def text(self) -> str:
        """Formatted as part of a sentence."""
        if self.standard_error is None:
            return f"at least {self.num_envs:.0f} environments (not resolved by {self.iterations} iterations)"
        return f"{self.num_envs:.0f} +- {self.standard_error:.0f} environments ({self.iterations} iterations)"


def noise_scale(pairs: Sequence[NormPair], *, small_envs: int, big_envs: int) -> NoiseScale:
    """N_noise = tr(Sigma) / |G|^2; numerator and denominator are averaged over iterations before the division.

    If |G|^2 is within two standard errors of zero, its upper end gives a lower bound of N_noise. There is a pair
    for each iteration; ``small_envs`` and ``big_envs`` are the environments of a group and of all.

    Raises:
        ValueError: fewer than two pairs, or groups as large as all.
    """
    count = len(pairs)
    if count < 2 or not 0 < small_envs < big_envs:
        raise ValueError(f"{count} pairs of {small_envs} and {big_envs} environments: 2 pairs are needed")
    # Unbiased estimates (appendix A.1): |G|^2 = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small),
    # tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big).
    signals = [(big_envs * pair.big - small_envs * pair.small) / (big_envs - small_envs) for pair in pairs]
    noises = [(pair.small - pair.big) / (1 / small_envs - 1 / big_envs) for pair in pairs]
    signal, noise = sum(signals), max(0.0, sum(noises))
    signal_error = math.sqrt(count * sum((each - signal / count) ** 2 for each in signals) / (count - 1))
    if signal <= 2 * signal_error:
        at_least = noise / (max(0.0, signal) + 2 * signal_error) if signal_error > 0 else 0.0
        return NoiseScale(num_envs=at_least, standard_error=None, iterations=count)
    # Jackknife: the ratio without each iteration in turn; error^2 = (n - 1) / n sum (ratio_i - mean)^2.
    ratios = [(noise - less) / (signal - own) for less, own in zip(noises, signals, strict=True)]
    mean = sum(ratios) / count
    error = math.sqrt((count - 1) / count * sum((each - mean) ** 2 for each in ratios))
    return NoiseScale(num_envs=noise / signal, standard_error=error, iterations=count)


def useful_steps_per_s(noise: NoiseScale, num_envs: int, steps_per_s: float) -> float:
    """steps_per_s / (1 + num_envs / N_noise): throughput over the factor of extra steps. ``num_envs``: of all GMIs."""
    if noise.num_envs == 0:
        return steps_per_s / num_envs  # nothing but signal: every environment beyond the first is waste
    return steps_per_s / (1 + num_envs / noise.num_envs)


class GradientNoiseUpdater(PPOUpdater):
    """PPOUpdater that measures, before each update, the policy gradients of groups of environments."""

    def __init__(self, model: Model, spec: PPOSpec, communicator: Communicator, num_envs: int) -> None:
        super().__init__(model, spec, communicator)
        self.num_envs = num_envs
        self.pairs: list[NormPair] = []

    def update(self, batch: OnPolicyBatch, orders: Tensor, iteration: int) -> dict[str, float]:
        """Measure at the parameters that collected the batch, then update."""
        # A recurrent network's minibatches lack the sequences of some environments: take all sequences.
        measured = orders[0] if batch.memory is None else batch.memory.order().unsqueeze(0)
        norms = torch.tensor([self._norms(batch, order) for order in measured], dtype=torch.float64)
        small, big = norms.mean(0).tolist()
        self.pairs.append(NormPair(small=small, big=big))
        return super().update(batch, orders, iteration)

    def _norms(self, batch: OnPolicyBatch, order: Tensor) -> tuple[float, float]:
        """Squared norms of one minibatch: mean over the groups, and of all environments together."""
        group = order % self.num_envs * GROUPS // self.num_envs
        gradients = torch.stack([self._policy_gradient(batch, order[group == g]) for g in range(GROUPS)])
        return float(gradients.square().sum(1).mean()), float(gradients.mean(0).square().sum())

    def _policy_gradient(self, batch: OnPolicyBatch, order: Tensor) -> Tensor:
        """Gradient of the loss with respect to the policy's parameters only."""
        total, _ = self.loss(batch, order)
        parts = torch.autograd.grad(total, self.model.policy_parameters())
        return torch.cat([part.reshape(-1) for part in parts])
