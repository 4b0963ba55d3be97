"""Action distributions as functions of network outputs and noise (reparameterised), so that all layouts agree.

A head takes outputs (B, num_outputs) and noise of the same shape: Gumbel if ``gumbel_noise``, else standard normal. Actions
are (B, dim), or (B,) for one choice; log probabilities are (B,); the entropy in nats is a scalar.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal
from torch.nn.functional import logsigmoid, pad

from actors.protocols import ActionSpec
from actors.rollout import epsilon_greedy_noise, exploration_noise
from rayagi.config.spec import HeadName

LOG_SQRT_TAU = 0.5 * math.log(2 * math.pi)
_QUADRATURE_POINTS = 16
_LARGEST_TANH = 1 - 1e-6
"""Of recorded actions: at 1, u would be infinite."""


def diagonal_gaussian(mean: Tensor, std: Tensor) -> Independent:
    """N(mean, std^2) of independent dimensions, the last ones."""
    return Independent(Normal(mean, std, validate_args=False), 1, validate_args=False)


class Head(nn.Module, ABC):
    """An action distribution."""

    gumbel_noise: ClassVar[bool]
    mode_noise: ClassVar[float] = 0.0
    """Noise for which ``sample`` gives the mode."""
    bounded: ClassVar[bool] = False
    """Whether the environment's actions are within their range without clipping."""
    num_outputs: int
    """Outputs of the policy network."""

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """Noise for ``sample`` on the host, (T, N, num_outputs) float32; arguments as of ``Policy.noise``."""
        return exploration_noise(
            seed=seed,
            first_env_index=first_env_index,
            num_envs=num_envs,
            iteration=number,
            num_steps=num_steps,
            dim=self.num_outputs,
            gumbel=self.gumbel_noise,
        )

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions for given noise."""

    @abstractmethod
    def mode(self, outputs: Tensor) -> Tensor:
        """The most likely actions."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Log probability, or density, of actions."""

    @abstractmethod
    def entropy(self, outputs: Tensor) -> Tensor:
        """Mean over the batch."""

    @abstractmethod
    def distribution(self, outputs: Tensor) -> Distribution:
        """The distribution of each row, whose Kullback-Leibler divergences torch knows."""

    def spread(self) -> float:
        """Mean standard deviation; 0 for choices, which have none, and where it depends on the state."""
        return 0.0

    def environment_actions(self, actions: Tensor) -> Tensor:
        """What the environment receives for these actions."""
        return actions

    def from_environment(self, actions: Tensor) -> Tensor:
        """Inverse of ``environment_actions``, for recorded actions."""
        return actions


class GaussianHead(Head):
    """Diagonal Gaussian whose log standard deviation does not depend on the state."""

    gumbel_noise = False

    def __init__(self, dim: int, initial_log_std: float) -> None:
        super().__init__()
        self.num_outputs = dim
        self.log_std = nn.Parameter(torch.full((dim,), float(initial_log_std)))

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Mean plus noise scaled by the standard deviation."""
        return torch.addcmul(outputs, noise, self.log_std.exp())

    def mode(self, outputs: Tensor) -> Tensor:
        """The mean."""
        return outputs

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Sum over dimensions of log N(action; mean, std)."""
        standardised = (actions - outputs) * (-self.log_std).exp()
        constant = self.log_std.sum() + LOG_SQRT_TAU * outputs.shape[-1]
        return -0.5 * standardised.square().sum(-1) - constant

    def entropy(self, outputs: Tensor) -> Tensor:
        """Sum over dimensions of log std + log sqrt(2 pi e); the same for every state."""
        return self.log_std.sum() + (0.5 + LOG_SQRT_TAU) * outputs.shape[-1]

    def distribution(self, outputs: Tensor) -> Distribution:
        """N(outputs, std)."""
        return diagonal_gaussian(outputs, self.log_std.exp().expand_as(outputs))

    def spread(self) -> float:
        """Mean standard deviation."""
        return float(self.log_std.detach().exp().mean())


class StateGaussianHead(Head):
    """Diagonal Gaussian as in RLlib: the outputs are the means, then the log standard deviations."""

    gumbel_noise = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_outputs = 2 * dim

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Mean plus noise scaled by the standard deviation; half of the noise is not used."""
        mean, log_std = outputs.chunk(2, -1)
        return torch.addcmul(mean, noise[..., : mean.shape[-1]], log_std.exp())

    def mode(self, outputs: Tensor) -> Tensor:
        """The mean."""
        return outputs.chunk(2, -1)[0]

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Sum over dimensions of log N(action; mean, std)."""
        mean, log_std = outputs.chunk(2, -1)
        standardised = (actions - mean) * (-log_std).exp()
        return -(0.5 * standardised.square() + log_std + LOG_SQRT_TAU).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """Sum over dimensions of log std + log sqrt(2 pi e), averaged over the batch."""
        return (outputs.chunk(2, -1)[1] + 0.5 + LOG_SQRT_TAU).sum(-1).mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """N(mean, std)."""
        mean, log_std = outputs.chunk(2, -1)
        return diagonal_gaussian(mean, log_std.exp())


class SquashedGaussianHead(GaussianHead):
    """centre + scale tanh(u) with a diagonal Gaussian u, within a bounded box.

    Actions are u everywhere but in the environment: tanh(u) has lost u's digits near the bounds. By the change of variables,
    log p(a) = log N(u) - sum over dimensions of log |da/du|, with da/du = scale (1 - tanh^2 u).
    """

    bounded = True
    centre: Tensor
    scale: Tensor
    points: Tensor
    weights: Tensor

    def __init__(self, low: tuple[float, ...], high: tuple[float, ...], initial_log_std: float) -> None:
        super().__init__(len(low), initial_log_std)
        lowest, highest = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        points, weights = np.polynomial.hermite.hermgauss(_QUADRATURE_POINTS)
        for name, constant in (
            ("centre", (highest + lowest) / 2),
            ("scale", (highest - lowest) / 2),
            ("points", math.sqrt(2) * torch.from_numpy(points)),
            ("weights", torch.from_numpy(weights) / math.sqrt(math.pi)),
        ):
            self.register_buffer(name, constant.float(), persistent=False)

    def environment_actions(self, actions: Tensor) -> Tensor:
        """centre + scale tanh(u)."""
        return torch.addcmul(self.centre, self.scale, actions.tanh())

    def from_environment(self, actions: Tensor) -> Tensor:
        """u = atanh((a - centre) / scale), where actions at a bound count as slightly within it: |u| <= 7.3."""
        return ((actions - self.centre) / self.scale).clamp(-_LARGEST_TANH, _LARGEST_TANH).atanh()

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Log density of the environment's actions, from u."""
        return super().log_prob(outputs, actions) - self._log_slopes(actions).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """Of the environment's actions: H(u) + E[log |da/du|], the mean by Gauss-Hermite quadrature of 16 points.

        E f(u) = 1 / sqrt(pi) * sum_k w_k f(mean + sqrt(2) std x_k).
        """
        actions = outputs.unsqueeze(-2) + self.points.unsqueeze(-1) * self.log_std.exp()
        expected = (self.weights.unsqueeze(-1) * self._log_slopes(actions)).sum((-2, -1)).mean()
        return super().entropy(outputs) + expected

    def distribution(self, outputs: Tensor) -> Distribution:
        """Its divergences are those of u: they do not depend on an invertible map."""
        normal = diagonal_gaussian(outputs, self.log_std.exp().expand_as(outputs))
        return _Squashed(normal, self.entropy(outputs), self._log_slopes)

    def _log_slopes(self, actions: Tensor) -> Tensor:
        """log |da/du| of each dimension: log scale + 2 (log 2 - |u| - log(1 + exp(-2 |u|)))."""
        size = actions.abs()
        return self.scale.log() + 2 * (math.log(2) - size - (-2 * size).exp().log1p())


class _Squashed(Independent):
    """The Gaussian of u with the density and the entropy of the environment's actions."""

    def __init__(self, normal: Independent, entropy: Tensor, log_slopes: Callable[[Tensor], Tensor]) -> None:
        super().__init__(normal.base_dist, 1, validate_args=False)
        self._entropy, self._log_slopes = entropy, log_slopes

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value) - self._log_slopes(value).sum(-1)

    def entropy(self) -> Tensor:
        return self._entropy


class CategoricalHead(Head):
    """One choice out of ``num_outputs``; sampled by the Gumbel-max trick."""

    gumbel_noise = True

    def __init__(self, num_choices: int) -> None:
        super().__init__()
        self.num_outputs = num_choices

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """argmax(logits + Gumbel noise) is distributed as softmax(logits)."""
        return (outputs + noise).argmax(-1)

    def mode(self, outputs: Tensor) -> Tensor:
        """The largest logit."""
        return outputs.argmax(-1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Log softmax at the chosen index."""
        return outputs.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """-sum p log p, averaged over the batch."""
        return -_p_log_p(outputs.log_softmax(-1)).sum(-1).mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """Categorical(logits)."""
        return Categorical(logits=outputs, validate_args=False)


class EpsilonGreedyHead(CategoricalHead):
    """The choice of the largest output, or with probability epsilon any choice; outputs are action values.

    Epsilon is state of the model, so that it reaches whoever acts together with the parameters.
    """

    gumbel_noise = False
    epsilon: Tensor

    def __init__(self, num_choices: int) -> None:
        super().__init__(num_choices)
        self.register_buffer("epsilon", torch.ones(()))

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """Infinite at the choices that epsilon picks, else zero."""
        return epsilon_greedy_noise(
            seed=seed,
            first_env_index=first_env_index,
            num_envs=num_envs,
            iteration=number,
            num_steps=num_steps,
            num_choices=self.num_outputs,
            epsilon=float(self.epsilon),
        )

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """log(epsilon / choices + (1 - epsilon) [a is greedy])."""
        return self.probabilities(outputs).gather(-1, actions.unsqueeze(-1)).squeeze(-1).log()

    def entropy(self, outputs: Tensor) -> Tensor:
        """-sum p log p, averaged over the batch."""
        return torch.special.entr(self.probabilities(outputs)).sum(-1).mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """Categorical(probabilities)."""
        return Categorical(probs=self.probabilities(outputs), validate_args=False)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Of each choice, (..., num_outputs)."""
        shared = (self.epsilon / self.num_outputs).expand_as(outputs)
        return shared.scatter_add(
            -1, self.mode(outputs).unsqueeze(-1), (1 - self.epsilon).expand_as(outputs[..., :1])
        )


class MultiCategoricalHead(Head):
    """Several independent choices at once, (B, dim). The outputs are the logits of all options, concatenated."""

    gumbel_noise = True

    def __init__(self, choices: tuple[int, ...]) -> None:
        """``choices``: number of options of each choice."""
        super().__init__()
        self.choices, self.num_outputs = choices, sum(choices)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """For each choice argmax(logits + Gumbel noise)."""
        return self.mode(outputs + noise)

    def mode(self, outputs: Tensor) -> Tensor:
        """The largest logit of each choice."""
        return torch.stack([part.argmax(-1) for part in outputs.split(self.choices, -1)], -1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Sum over choices of the log softmax at the chosen option: they are independent given the state."""
        return sum(
            part.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            for part, chosen in zip(outputs.split(self.choices, -1), actions.unbind(-1), strict=True)
        )

    def entropy(self, outputs: Tensor) -> Tensor:
        """Sum over choices of -sum p log p, averaged over the batch."""
        log_p = torch.cat([part.log_softmax(-1) for part in outputs.split(self.choices, -1)], -1)
        return -_p_log_p(log_p).sum(-1).mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """All choices, padded to the largest number of logits: one of -1e9 has probability 0 and no effect on the KL."""
        most = max(self.choices)
        parts = outputs.split(self.choices, -1)
        padded = torch.stack([pad(part, (0, most - part.shape[-1]), value=-1e9) for part in parts], -2)
        return Independent(Categorical(logits=padded, validate_args=False), 1, validate_args=False)


class BernoulliHead(Head):
    """Independent bits, (B, dim) of 0 and 1; each has one logit."""

    gumbel_noise = True
    mode_noise = -math.log(math.log(2))  # u = 1/2

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_outputs = dim

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """1 where sigmoid(logit) exceeds u, the uniform variate exp(-exp(-g)) of Gumbel noise g."""
        # logit > log(u / (1 - u)) with log u = -exp(-g).
        log_u = -(-noise).exp()
        return (outputs > log_u - (-log_u.expm1()).log()).long()

    def mode(self, outputs: Tensor) -> Tensor:
        """1 where the logit is positive."""
        return (outputs > 0).long()

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Sum over bits of log sigmoid(logit) of a 1, log sigmoid(-logit) of a 0."""
        return logsigmoid(torch.where(actions == 1, outputs, -outputs)).sum(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """Sum over bits of -p log p - (1 - p) log(1 - p), averaged over the batch."""
        return -(_p_log_p(logsigmoid(outputs)) + _p_log_p(logsigmoid(-outputs))).sum(-1).mean()

    def distribution(self, outputs: Tensor) -> Distribution:
        """Each bit as a choice between the logits 0 and l."""
        logits = torch.stack((torch.zeros_like(outputs), outputs), -1)
        return Independent(Categorical(logits=logits, validate_args=False), 1, validate_args=False)


def _p_log_p(log_p: Tensor) -> Tensor:
    """p log p of each log p. A masked choice, of the logit -infinity, gives 0 and a gradient of 0: not 0 times infinity."""
    return log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)


def make_head(
    action: ActionSpec, initial_log_std: float, name: HeadName = "auto", *, free_log_std: bool = True
) -> Head:
    """The head for an action space that ``name`` fits (rayagi.config.rules.refuse_unfit_head)."""
    if name == "squashed_gaussian":
        return SquashedGaussianHead(action.low, action.high, initial_log_std)
    if name == "bernoulli":
        return BernoulliHead(action.dim)
    if action.kind == "discrete":
        return CategoricalHead(action.num_choices)
    if action.kind == "multi_discrete":
        return MultiCategoricalHead(action.choices)
    return GaussianHead(action.dim, initial_log_std) if free_log_std else StateGaussianHead(action.dim)
