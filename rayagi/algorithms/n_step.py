"""n-step returns of trajectory windows, up to the end of the episode (Sutton 1988; Hessel et al. 2018, eq. 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NStep(NamedTuple):
    """The bootstrapped part of n-step targets: target = returns + discounts * V(state after step ``last``).

    Attributes:
        returns: sum of the discounted rewards                    (B,)
        discounts: gamma^m, or 0 after a terminated episode       (B,)
        last: step of the window after which to bootstrap, m - 1  (B,) int64
    """

    returns: Tensor
    discounts: Tensor
    last: Tensor


def n_step_returns(
    *, rewards: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, valid: Tensor | None = None
) -> NStep:
    """n-step returns of windows of n steps, batch first.

    returns = sum_{k < m} gamma^k r_k with m = min(n, steps to the end of the episode, steps that the window has). A time
    limit bootstraps from the observation before the reset; a terminated episode does not.

    Args:
        rewards: reward after each action                                 (B, n)
        terminated: the task ended after this step                        (B, n) bool
        truncated: the time limit cut the episode after this step         (B, n) bool
        gamma: discount per step
        valid: steps that exist: the first, and those that follow without a gap; None: all    (B, n) bool
    """
    n = rewards.shape[1]
    ended = terminated | truncated
    # Step k counts if no step before it ended the episode, and if it exists.
    counts = torch.ones_like(ended)
    counts[:, 1:] = ended[:, :-1].cumsum(1) == 0
    if valid is not None:
        counts &= valid
    # R = sum_k gamma^k r_k; what does not count may be anything, also NaN.
    powers = gamma ** torch.arange(n, dtype=rewards.dtype, device=rewards.device)
    returns = torch.where(counts, rewards, 0.0) @ powers
    lengths = counts.sum(1)
    last = (lengths - 1).clamp(min=0)
    # gamma^m (1 - terminated_{m-1}).
    final = terminated.gather(1, last.unsqueeze(1)).squeeze(1)
    discounts = gamma ** lengths.to(rewards.dtype) * ~final
    return NStep(returns, discounts, last)
