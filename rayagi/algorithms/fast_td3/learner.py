"""FastTD3 (Seo et al. 2025): TD3 with distributional critics and AdamW, without a target policy.

Its deterministic policy explores with a noise level of each environment.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from actors.protocols import EnvInfo
from actors.rollout import environment_generators
from rayagi.algorithms.distributional_critics import (
    DistributionalActorQ,
    DistributionalLearner,
    DistributionalUpdater,
)
from rayagi.algorithms.fast_td3 import FastTD3Spec
from rayagi.algorithms.transitions import Transitions
from rayagi.config.spec import NetworkSpec
from rayagi.models.exploring_heads import DeterministicHead
from rayagi.models.heads import LOG_SQRT_TAU, diagonal_gaussian

LEVEL_STEPS = 1000
"""Steps of an environment after which its noise level is drawn anew: the usual time limit of an episode."""
_LEVELS = 16


class MixedNoiseHead(DeterministicHead):
    """tanh(outputs), plus noise that is already scaled by the environment's level, clipped to [-1, 1].

    Actions are normalised everywhere but in the environment. The density is that of an environment of unknown level.
    """

    levels: Tensor

    def __init__(self, info: EnvInfo, spec: FastTD3Spec) -> None:
        low, high = self._range = spec.noise_min, spec.noise_max
        super().__init__(info.action.low, info.action.high, exploration_noise=(low + high) / 2)
        self._rollout_length = spec.rollout_length
        middles = (torch.arange(_LEVELS) + 0.5) / _LEVELS
        self.register_buffer("levels", low + middles * (high - low), persistent=False)

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """Standard normal noise times the level of each environment, (T, N, dim)."""
        noise = super().noise(num_steps, num_envs, seed=seed, first_env_index=first_env_index, number=number)
        envs = range(first_env_index, first_env_index + num_envs)
        period = number * self._rollout_length // LEVEL_STEPS
        drawn = [
            each.uniform(*self._range) for each in environment_generators(seed, envs, "noise_level", period)
        ]
        return noise * torch.tensor(drawn, dtype=noise.dtype).unsqueeze(-1)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """clip(tanh(outputs) + noise, -1, 1)."""
        return (outputs.tanh() + noise).clamp(-1.0, 1.0)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """log of the mean density over 16 levels, without the clip, of the environment's actions."""
        std = self.levels.clamp(min=1e-6).unsqueeze(-1)
        errors = (actions - outputs.tanh()).unsqueeze(-2) / std
        densities = -(0.5 * errors.square() + std.log() + LOG_SQRT_TAU).sum(-1)
        return densities.logsumexp(-1) - math.log(_LEVELS) - self.scale.log().sum()

    def entropy(self, outputs: Tensor) -> Tensor:
        """Mean over the levels of a Gaussian's entropy."""
        logs = self.levels.clamp(min=1e-6).log() + 0.5 + LOG_SQRT_TAU
        return logs.mean() * outputs.shape[-1]

    def distribution(self, outputs: Tensor) -> Distribution:
        """A Gaussian of the mean level about the mode."""
        return diagonal_gaussian(outputs.tanh(), self.levels.mean().expand_as(outputs))


class FastTD3Model(DistributionalActorQ):
    """A policy whose exploration has a noise level of each environment, and critics twice as wide."""

    head: MixedNoiseHead

    def __init__(self, info: EnvInfo, network: NetworkSpec, spec: FastTD3Spec, seed: int) -> None:
        head = MixedNoiseHead(info, spec)
        super().__init__(info, network, head, spec, seed=seed, critic_width=2.0)


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


class FastTD3Learner(DistributionalLearner[FastTD3Spec]):
    """The learner of FastTD3."""

    updater_class = FastTD3Updater
