"""A squashed Gaussian policy and the temperature of its entropy (Haarnoja et al. 2018), for several algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from actors.protocols import StateDict
from rayagi.algorithms.fast_sac import FastSACSpec
from rayagi.algorithms.off_policy import OffPolicyUpdater
from rayagi.algorithms.sac import SACSpec
from rayagi.config.off_policy import OffPolicySpec
from rayagi.models.actor_q import ActorQ
from rayagi.models.exploring_heads import StateSquashedGaussianHead, log_slopes
from rayagi.models.heads import LOG_SQRT_TAU

SpecT = TypeVar("SpecT", bound=OffPolicySpec)


class Temperature(nn.Module):
    """log alpha, as a parameter."""

    def __init__(self, initial: float, device: torch.device) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.full((), math.log(initial), device=device))


class MaximumEntropyUpdater(OffPolicyUpdater[SpecT]):
    """Samples the policy's actions, and steps the temperature. What steps the networks derives from it."""

    model: ActorQ

    def __init__(self, model: ActorQ, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        assert isinstance(model.head, StateSquashedGaussianHead)
        self.head = model.head
        settings = self.spec
        assert isinstance(settings, SACSpec | FastSACSpec)
        self.temperature = Temperature(settings.initial_alpha, self.device)
        rate = settings.alpha_learning_rate
        self.alpha = self._group("alpha", self.temperature, self.spec.learning_rate if rate is None else rate)
        self._dim = self.info.action.dim
        target = settings.target_entropy
        self._target_entropy = -float(self._dim) if target is None else target

    def _step_temperature(self, log_probs: Tensor) -> None:
        """J(alpha) = -alpha E[log pi(a|s) + target entropy]; its derivative by log alpha is J itself."""
        alpha = self.temperature.log_alpha.detach().exp()
        self.alpha.flat.gradients[0] = -self.weight * alpha * (log_probs + self._target_entropy)
        self.alpha.step()

    def _sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Actions tanh(u) in [-1, 1] of the current policy, (B, dim), and their log densities, (B,)."""
        mean, log_std = self.head.gaussian(self.model.policy(obs))
        noise = self.noise(len(obs))
        u = torch.addcmul(mean, noise, log_std.exp())
        # log pi = log N(u) - sum over dimensions of log |d tanh(u) / du|; (u - mean) / std is the noise.
        inside = 0.5 * noise.square() + log_std + log_slopes(u)
        return u.tanh(), -inside.sum(-1) - LOG_SQRT_TAU * self._dim

    def noise(self, count: int) -> Tensor:
        """Standard normal noise for actions, (count, dim)."""
        return torch.randn((count, self._dim), generator=self.generator, device=self.device)

    def state_dict(self) -> StateDict:
        """As of every updater, and the temperature."""
        return {**super().state_dict(), "log_alpha": float(self.temperature.log_alpha.detach())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place; a state without a temperature leaves it."""
        super().load_state_dict(state)
        if "log_alpha" in state:
            with torch.no_grad():
                self.temperature.log_alpha.fill_(state["log_alpha"])
