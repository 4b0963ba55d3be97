"""Running normalisers whose statistics merge exactly across GMIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.protocols import StateDict
from collectives.statistics import Moments, merged
from rayagi.algorithms.returns import discounted_returns

_EPSILON = 1e-8


def moments_state(moments: Moments) -> StateDict:
    """Plain tensors, for a checkpoint."""
    return {"count": moments.count, "mean": moments.mean, "m2": moments.m2}


def moments_from_state(state: Mapping[str, Any]) -> Moments:
    """Inverse of moments_state."""
    return Moments(count=state["count"], mean=state["mean"], m2=state["m2"])


class ObservationNormaliser:
    """(obs - mean) / std, clipped. Statistics change only between rollouts, so every step of a rollout is seen alike.

    Before the first update it is the identity (clipped). ``shift`` is the mean, ``scale`` 1 / std, (obs_dim,).
    """

    def __init__(self, obs_dim: int, clip: float, device: torch.device) -> None:
        self.clip, self.device = clip, device
        self.moments = Moments.empty((obs_dim,))
        self.shift = torch.zeros(obs_dim, device=device)
        self.scale = torch.ones(obs_dim, device=device)

    def __call__(self, obs: Tensor) -> Tensor:
        """(..., obs_dim) float32 to the same shape, on the device."""
        return ((obs.to(self.device) - self.shift) * self.scale).clamp_(-self.clip, self.clip)

    def update(self, batch: Moments) -> None:
        """Take in the moments of a rollout's raw observations, already merged over GMIs."""
        self.moments = merged(self.moments, batch)
        self._refresh()

    def _refresh(self) -> None:
        if self.moments.count > 0:
            self.shift = self.moments.mean.float().to(self.device)
            self.scale = (self.moments.variance() + _EPSILON).rsqrt().float().to(self.device)

    def state_dict(self) -> StateDict:
        """Count, mean and M2."""
        return moments_state(self.moments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count, mean and M2."""
        self.moments = moments_from_state(state)
        self._refresh()


class RewardScaler:
    """Divides rewards by the standard deviation of the running discounted return; the mean is kept (as the field does)."""

    def __init__(self, num_envs: int, gamma: float, clip: float = 10.0) -> None:
        self.gamma, self.clip = gamma, clip
        self.moments = Moments.empty()
        self.running = torch.zeros(num_envs)
        """Discounted return so far of each running episode; belongs to this GMI's environments."""

    def observe(self, rewards: Tensor, done: Tensor) -> Moments:
        """Advance the running returns over a rollout, (T, N) each. Returns the moments of this GMI's samples."""
        returns, self.running = discounted_returns(rewards, done, self.running, self.gamma)
        return Moments.of(returns.reshape(-1))

    def update(self, batch: Moments) -> None:
        """Take in a rollout's moments, already merged over GMIs."""
        self.moments = merged(self.moments, batch)

    def __call__(self, rewards: Tensor) -> Tensor:
        """Scaled and clipped rewards."""
        scale = float((self.moments.variance() + _EPSILON).rsqrt())
        return (rewards * scale).clamp_(-self.clip, self.clip)
