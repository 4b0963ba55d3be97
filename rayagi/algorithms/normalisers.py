"""Statistics of observations and returns, which merge exactly across GMIs, and the running normalisers that use them.

Merging follows Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
(1979): the moments of a union from the moments of its parts, without the cancellation of sums of squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from actors.protocols import StateDict
from collectives.communicator import Communicator
from rayagi.algorithms.returns import discounted_returns

_EPSILON = 1e-8
_REWARD_CLIP = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of vectors; float64, on the CPU or where the batch was.

    Attributes:
        count: how many vectors            ()
        mean: their mean                   (*shape)
        m2: sum of squared deviations      (*shape)
    """

    count: Tensor
    mean: Tensor
    m2: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...] = (), device: torch.device | str = "cpu") -> Self:
        """Moments of the empty set: the neutral element of ``merged``."""
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(count=torch.zeros((), dtype=torch.float64, device=device), mean=zeros, m2=zeros.clone())

    @classmethod
    def from_batch(cls, batch: Tensor) -> Self:
        """Moments over the first dimension of ``batch`` (B, *shape); an empty batch gives ``empty``."""
        if batch.shape[0] == 0:
            return cls.empty(tuple(batch.shape[1:]), batch.device)
        values = batch.to(torch.float64)
        count = torch.full((), float(batch.shape[0]), dtype=torch.float64, device=batch.device)
        mean = values.mean(dim=0)
        return cls(count=count, mean=mean, m2=(values - mean).square().sum(dim=0))

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return type(self)(count=self.count.to(device), mean=self.mean.to(device), m2=self.m2.to(device))

    def clone(self) -> Self:
        """A copy."""
        return type(self)(count=self.count.clone(), mean=self.mean.clone(), m2=self.m2.clone())

    def packed(self) -> Tensor:
        """Count, mean and m2 as one vector, (1 + 2 * size,)."""
        return torch.cat([self.count.reshape(1), self.mean.reshape(-1), self.m2.reshape(-1)])

    @classmethod
    def unpacked(cls, packed: Tensor, shape: Sequence[int]) -> Self:
        """Inverse of ``packed``, for moments of vectors of this shape; views of ``packed``."""
        mean, m2 = packed[1:].view(2, *shape)
        return cls(count=packed[0], mean=mean, m2=m2)

    def variance(self) -> Tensor:
        """Population variance (*shape): m2 / count; zeros where nothing was counted."""
        return self.m2 / self.count.clamp(min=1.0)


def merged(a: Moments, b: Moments) -> Moments:
    """Moments of the union of two sets, of the same shape and device."""
    count = a.count + b.count
    share = b.count / count.clamp(min=1.0)
    delta = b.mean - a.mean
    # mean = mean_a + delta n_b / n;  m2 = m2_a + m2_b + delta^2 n_a n_b / n
    return Moments(
        count=count, mean=a.mean + delta * share, m2=a.m2 + b.m2 + delta.square() * (a.count * share)
    )


def all_merge(moments: Moments, communicator: Communicator) -> Moments:
    """Moments of the union over all members, merged in rank order, so bitwise equal on all of them.

    Every member passes moments of the same shape. One all_gather of ``1 + 2 * size`` float64.

    Raises:
        CommunicatorError: another member is missing or too late.
    """
    gathered = communicator.all_gather(moments.packed())
    union = Moments.unpacked(gathered[0], moments.mean.shape)
    for row in gathered[1:]:
        union = merged(union, Moments.unpacked(row, moments.mean.shape))
    return union


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

    def state_dict(self) -> StateDict:
        """Count, mean and M2."""
        return moments_state(self.moments)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count, mean and M2."""
        self.set_moments(moments_from_state(state))

    def set_moments(self, moments: Moments) -> None:
        """Replace the statistics."""
        self.moments = moments
        # In place: a captured CUDA graph reads these tensors by address.
        # shift = mean, scale = 1 / sqrt(var + eps); 0 and 1 before anything was counted, also where that is restored.
        if self.moments.count == 0:
            self.shift.zero_()
            self.scale.fill_(1.0)
        else:
            self.shift[self._columns] = self.moments.mean.to(self.shift)
            self.scale[self._columns] = (self.moments.variance() + _EPSILON).rsqrt().to(self.scale)


class RewardScaler:
    """Divides rewards by the standard deviation of the running discounted return. The mean is not subtracted.

    Safe to capture in a CUDA graph: tensors are updated in place, and no operation synchronizes with the device.
    """

    def __init__(self, num_envs: int, gamma: float, device: torch.device | str = "cpu") -> None:
        self.gamma = gamma
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
        """Scaled and clipped rewards, (...), on the scaler's device: clip(r / sqrt(Var(R) + eps), -10, 10)."""
        scale = (self.moments.variance() + _EPSILON).rsqrt()
        return (rewards.to(scale.device) * scale).clamp_(-_REWARD_CLIP, _REWARD_CLIP)
