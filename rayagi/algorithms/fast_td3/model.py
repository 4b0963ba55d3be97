"""FastTD3's model: a deterministic policy, which explores with a noise level of each environment, and its critics."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from actors.noise import environment_generators, exploration_noise
from actors.protocols import EnvInfo
from rayagi.algorithms.distributional_critics import DistributionalActorQ
from rayagi.algorithms.fast_td3 import FastTD3Spec
from rayagi.config.spec import NetworkSpec
from rayagi.models.exploring_heads import BoxHead

LEVEL_STEPS = 1000
"""Steps of an environment after which its noise level is drawn anew: the usual time limit of an episode."""
_LEVELS = 16
_LOG_SQRT_TAU = 0.5 * math.log(2 * math.pi)


class MixedNoiseHead(BoxHead):
    """tanh(outputs), plus noise that is already scaled by the environment's level, clipped to [-1, 1].

    Actions are normalised everywhere but in the environment. The density is that of an environment of unknown level.
    """

    levels: Tensor

    def __init__(self, info: EnvInfo, noise_min: float, noise_max: float) -> None:
        super().__init__(info.action.low, info.action.high)
        self.num_outputs = info.action.dim
        middles = (torch.arange(_LEVELS) + 0.5) / _LEVELS
        self.register_buffer("levels", noise_min + middles * (noise_max - noise_min), persistent=False)

    def normalised(self, actions: Tensor) -> Tensor:
        """The same."""
        return actions

    def _denormalised(self, normalised: Tensor) -> Tensor:
        return normalised

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """clip(tanh(outputs) + noise, -1, 1)."""
        return (outputs.tanh() + noise).clamp(-1.0, 1.0)

    def mode(self, outputs: Tensor) -> Tensor:
        """tanh(outputs)."""
        return outputs.tanh()

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """log of the mean density over 16 levels, without the clip, of the environment's actions."""
        std = self.levels.clamp(min=1e-6).unsqueeze(-1)
        errors = (actions - outputs.tanh()).unsqueeze(-2) / std
        densities = -(0.5 * errors.square() + std.log() + _LOG_SQRT_TAU).sum(-1)
        return densities.logsumexp(-1) - math.log(_LEVELS) - self.scale.log().sum()

    def entropy(self, outputs: Tensor) -> Tensor:
        """Mean over the levels of a Gaussian's entropy."""
        logs = self.levels.clamp(min=1e-6).log() + 0.5 + _LOG_SQRT_TAU
        return logs.mean() * outputs.shape[-1]

    def distribution(self, outputs: Tensor) -> Distribution:
        """A Gaussian of the mean level about the mode."""
        std = self.levels.mean().expand_as(outputs)
        return Independent(Normal(outputs.tanh(), std, validate_args=False), 1, validate_args=False)


class FastTD3Model(DistributionalActorQ):
    """A policy whose exploration has a noise level of each environment, and critics twice as wide."""

    head: MixedNoiseHead

    def __init__(self, info: EnvInfo, network: NetworkSpec, spec: FastTD3Spec, seed: int) -> None:
        head = MixedNoiseHead(info, spec.noise_min, spec.noise_max)
        super().__init__(info, network, head, spec, seed=seed, critic_width=2.0)
        self._levels, self._rollout_length = (spec.noise_min, spec.noise_max), spec.rollout_length

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """Standard normal noise times the level of each environment, (T, N, dim)."""
        noise = exploration_noise(
            seed=seed, first_env_index=first_env_index, num_envs=num_envs, iteration=number,
            num_steps=num_steps, dim=self.head.num_outputs, gumbel=False,
        )  # fmt: skip
        envs = range(first_env_index, first_env_index + num_envs)
        period = number * self._rollout_length // LEVEL_STEPS
        low, high = self._levels
        drawn = [
            each.uniform(low, high) for each in environment_generators(seed, envs, "noise_level", period)
        ]
        return noise * torch.tensor(drawn, dtype=noise.dtype).unsqueeze(-1)


def make_model(info: EnvInfo, network: NetworkSpec, spec: FastTD3Spec, seed: int) -> FastTD3Model:
    """The initial model of a run."""
    return FastTD3Model(info, network, spec, seed)
