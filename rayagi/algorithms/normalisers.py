"""Running normalisers of observations and rewards. Their statistics merge exactly across GMIs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.protocols import StateDict
from collectives.statistics import Moments, merged
from rayagi.algorithms.returns import discounted_returns

_EPSILON = 1e-8


def moments_state(moments: Moments) -> StateDict:
    """Moments as plain tensors, for a checkpoint."""
    return {"count": moments.count, "mean": moments.mean, "m2": moments.m2}


def moments_from_state(state: Mapping[str, Any]) -> Moments:
    """Inverse of moments_state."""
    return Moments(count=state["count"], mean=state["mean"], m2=state["m2"])


class ObservationNormaliser:
    """(obs - mean) / std, clipped. Statistics change only between rollouts: all steps of a rollout use the same ones.

    Before the first update it only clips. ``shift`` is the mean, ``scale`` 1 / std, (obs_dim,).
    """

    def __init__(
        self, obs_dim: int, clip: float, device: torch.device, *, columns: tuple[int, ...] | None = None
    ) -> None:
        """``columns``: observation columns to normalise; the others pass through unchanged. None: all."""
        self.clip, self.device = clip, device
        self._columns = slice(None) if columns is None else torch.tensor(columns, device=device)
        bound = torch.full((obs_dim,), math.inf, device=device)
        bound[self._columns] = clip
        self._bound: Any = bound if columns is not None else clip
        self.moments = Moments.empty((obs_dim if columns is None else len(columns),))
        self.shift = torch.zeros(obs_dim, device=device)
        self.scale = torch.ones(obs_dim, device=device)

    def __call__(self, obs: Tensor) -> Tensor:
        """Normalise observations (..., obs_dim) float32. Returns the same shape, on the device."""
        # clip((obs - mean) / std, -bound, bound); the bound is infinite for columns that pass through.
        return ((obs.to(self.device) - self.shift) * self.scale).clamp_(-self._bound, self._bound)

    def moments_of(self, obs: Tensor) -> Moments:
        """Moments of the normalised columns of raw observations (..., obs_dim)."""
        columns = self._columns if isinstance(self._columns, slice) else self._columns.to(obs.device)
        kept = obs.reshape(-1, obs.shape[-1])[:, columns]
        return Moments.from_batch(kept)

    def update(self, batch: Moments) -> None:
        """Merge the moments of a rollout's raw observations into the running ones. ``batch`` covers all GMIs."""
        self.set_moments(merged(self.moments, batch))

    def _refresh(self) -> None:
        # In place: a captured CUDA graph reads these tensors by address.
        # shift = mean, scale = 1 / sqrt(var + eps); 0 and 1 before anything was counted, also where that is restored.
        if self.moments.count == 0:
            self.shift.zero_()
            self.scale.fill_(1.0)
        else:
            self.shift[self._columns] = self.moments.mean.to(self.shift)
            self.scale[self._columns] = (self.moments.variance() + _EPSILON).rsqrt().to(self.scale)

    def state_dict(self) -> StateDict:
        """Count, mean and M2."""
        return moments_state(self.moments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count, mean and M2."""
        self.set_moments(moments_from_state(state))

    def set_moments(self, moments: Moments) -> None:
        """Replace the statistics."""
        self.moments = moments
        self._refresh()


class RewardScaler:
    """Divides rewards by the standard deviation of the running discounted return. The mean is not subtracted.

    Safe to capture in a CUDA graph: tensors are updated in place, and no operation synchronizes with the device.
    """

    def __init__(
        self, num_envs: int, gamma: float, clip: float = 10.0, device: torch.device | str = "cpu"
    ) -> None:
        self.gamma, self.clip = gamma, clip
        self.moments = Moments.empty(device=device)
        self.running = torch.zeros(num_envs, device=device)
        """Discounted return so far of each running episode of this GMI, (N,)."""

    def observe(self, rewards: Tensor, done: Tensor) -> Moments:
        """Advance the running returns over a rollout, (T, N) each. Returns the moments of this GMI's samples."""
        device = self.running.device
        returns, running = discounted_returns(rewards.to(device), done.to(device), self.running, self.gamma)
        self.running.copy_(running)
        return Moments.from_batch(returns.reshape(-1))

    def update(self, batch: Moments) -> None:
        """Merge a rollout's moments into the running ones. ``batch`` covers all GMIs."""
        self.set_moments(merged(self.moments, batch.to(self.running.device)))

    def load(self, moments: Moments, running: Tensor | None) -> None:
        """Restore saved moments and running returns; without ``running``, the returns start at zero."""
        self.set_moments(moments)
        self.running.zero_() if running is None else self.running.copy_(running)

    def set_moments(self, moments: Moments) -> None:
        """Replace the statistics, in place."""
        for name in ("count", "mean", "m2"):
            getattr(self.moments, name).copy_(getattr(moments, name))

    def __call__(self, rewards: Tensor) -> Tensor:
        """Scaled and clipped rewards, (...), on the scaler's device: clip(r / sqrt(Var(R) + eps), -clip, clip)."""
        scale = (self.moments.variance() + _EPSILON).rsqrt()
        return (rewards.to(scale.device) * scale).clamp_(-self.clip, self.clip)
