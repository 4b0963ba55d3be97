"""Heads of off-policy algorithms: actions in a bounded box, uniformly random ones until there is something to learn from."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import softplus

from rayagi.models.heads import LOG_SQRT_TAU, Head, diagonal_gaussian

LOG_STD_RANGE = (-20.0, 2.0)
"""Of a standard deviation that is a network's output (Haarnoja et al. 2018)."""
_ALMOST_ONE = 1 - 2**-20


class BoxHead(Head):
    """Actions in a bounded box. Critics take them as [-1, 1], (B, dim): ``normalised``."""

    gumbel_noise = False
    bounded = True
    uniform: Tensor
    centre: Tensor
    scale: Tensor

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("uniform", torch.zeros(()))  # published with the parameters
        lowest, highest = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        self.register_buffer("centre", ((highest + lowest) / 2).float(), persistent=False)
        self.register_buffer("scale", ((highest - lowest) / 2).float(), persistent=False)

    def explore_uniformly(self, on: bool) -> None:
        """Sample uniformly random actions, or go back to the policy's."""
        self.uniform.fill_(float(on))

    @abstractmethod
    def normalised(self, actions: Tensor) -> Tensor:
        """Actions of a rollout as [-1, 1]."""

    def environment_actions(self, actions: Tensor) -> Tensor:
        """centre + scale a, of normalised actions a."""
        return torch.addcmul(self.centre, self.scale, self.normalised(actions))

    def from_environment(self, actions: Tensor) -> Tensor:
        """Inverse of ``environment_actions``; actions at a bound count as slightly within it."""
        return self._denormalised(((actions - self.centre) / self.scale).clamp(-_ALMOST_ONE, _ALMOST_ONE))

    def _or_uniform(self, actions: Tensor, noise: Tensor) -> Tensor:
        """Uniform actions instead, as the policy samples before it has learned. P(noise < z) = (1 + erf(z / sqrt 2)) / 2."""
        uniform = torch.erf(noise / math.sqrt(2)).clamp(-_ALMOST_ONE, _ALMOST_ONE)
        return torch.where(self.uniform > 0, self._denormalised(uniform), actions)

    @abstractmethod
    def _denormalised(self, normalised: Tensor) -> Tensor:
        """Inverse of ``normalised``, within (-1, 1)."""


class StateSquashedGaussianHead(BoxHead):
    """centre + scale tanh(u) with a diagonal Gaussian u: outputs are its means, then its log standard deviations.

    Actions are u everywhere but in the environment, as of SquashedGaussianHead.
    """

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...]) -> None:
        super().__init__(low, high)
        self.num_outputs = 2 * len(low)

    def gaussian(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations of u."""
        mean, log_std = outputs.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_RANGE)

    def normalised(self, actions: Tensor) -> Tensor:
        """tanh(u)."""
        return actions.tanh()

    def _denormalised(self, normalised: Tensor) -> Tensor:
        return normalised.atanh()

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Mean plus noise scaled by the standard deviation; half of the noise is not used."""
        mean, log_std = self.gaussian(outputs)
        used = noise[..., : mean.shape[-1]]
        return self._or_uniform(torch.addcmul(mean, used, log_std.exp()), used)

    def mode(self, outputs: Tensor) -> Tensor:
        """The mean of u."""
        return outputs.chunk(2, -1)[0]

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Log density of the environment's actions, from u: log N(u) - sum over dimensions of log |da/du|."""
        mean, log_std = self.gaussian(outputs)
        standardised = (actions - mean) * (-log_std).exp()
        inside = -(0.5 * standardised.square() + log_std + LOG_SQRT_TAU)
        density = (inside - log_slopes(actions)).sum(-1)
        return torch.where(self.uniform > 0, -math.log(2) * mean.shape[-1], density) - self.scale.log().sum()

    def entropy(self, outputs: Tensor) -> Tensor:
        """Of u, averaged over the batch: sum over dimensions of log std + log sqrt(2 pi e)."""
        return (self.gaussian(outputs)[1] + 0.5 + LOG_SQRT_TAU).sum(-1).mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """That of u: divergences do not depend on an invertible map."""
        mean, log_std = self.gaussian(outputs)
        return diagonal_gaussian(mean, log_std.exp())


class SmoothlyBoundedGaussianHead(StateSquashedGaussianHead):
    """The same with log standard deviations that tanh keeps between bounds, instead of a clip."""

    def __init__(
        self, low: tuple[float, ...], high: tuple[float, ...], log_std_range: tuple[float, float]
    ) -> None:
        super().__init__(low, high)
        self._middle, self._half = sum(log_std_range) / 2, (log_std_range[1] - log_std_range[0]) / 2

    def gaussian(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations of u: middle + half tanh(output)."""
        mean, raw = outputs.chunk(2, -1)
        return mean, self._middle + self._half * raw.tanh()


class DeterministicHead(BoxHead):
    """centre + scale tanh(output); exploration adds Gaussian noise to tanh(output), within [-1, 1].

    Actions are in [-1, 1] everywhere but in the environment.
    """

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...], exploration_noise: float) -> None:
        super().__init__(low, high)
        self.num_outputs, self._std = len(low), exploration_noise

    def normalised(self, actions: Tensor) -> Tensor:
        """As they are."""
        return actions

    def _denormalised(self, normalised: Tensor) -> Tensor:
        return normalised

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """clip(tanh(output) + std noise, -1, 1)."""
        return self._or_uniform((outputs.tanh() + self._std * noise).clamp(-1, 1), noise)

    def mode(self, outputs: Tensor) -> Tensor:
        """tanh(output)."""
        return outputs.tanh()

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Log density of the environment's actions before they are clipped: at the bounds, where several meet, as if not."""
        density = self.distribution(outputs).log_prob(actions)
        return (
            torch.where(self.uniform > 0, -math.log(2) * self.num_outputs, density) - self.scale.log().sum()
        )

    def entropy(self, outputs: Tensor) -> Tensor:
        """Of the noise before it is clipped."""
        return self.distribution(outputs).entropy().mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """N(tanh(output), std), before it is clipped."""
        mean = outputs.tanh()
        return diagonal_gaussian(mean, torch.full_like(mean, self._std))

    def spread(self) -> float:
        """Standard deviation of the exploration noise."""
        return self._std


def log_slopes(actions: Tensor) -> Tensor:
    """log |d tanh(u) / du| = log(1 - tanh^2 u) = 2 (log 2 - u - log(1 + exp(-2 u))), (..., dim)."""
    return 2 * (math.log(2) - actions - softplus(-2 * actions))
