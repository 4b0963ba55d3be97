"""GAE, discounted returns and explained variance: pure functions of a rollout, time first."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    *,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)
    A_t     = delta_t + gamma lambda (1 - done_t) A_{t+1}

    Args:
        rewards: reward after each action                                       (T, N)
        values: V(s_t)                                                          (T, N)
        next_values: V(s'_t), of the state after the action, before any reset   (T, N)
        terminated: the task ended; no bootstrap                                (T, N) bool
        done: terminated or truncated; the trace stops here                     (T, N) bool
        gamma: discount per step.
        gae_lambda: decay of the trace.

    Returns:
        advantages and value targets (advantages + values), each (T, N).
    """
    # TD residual: delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t).
    deltas = rewards + gamma * next_values * (~terminated) - values
    # A truncated episode still bootstraps in delta_t, but its trace must not reach into the next episode.
    decay = gamma * gae_lambda * (~done).to(rewards.dtype)
    advantages = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[0])  # A_T = 0: nothing after the rollout is known
    for t in range(rewards.shape[0] - 1, -1, -1):
        # Eq. 16 as a backward recursion: A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}.
        running = deltas[t] + decay[t] * running
        advantages[t] = running
    # The value target is the lambda-return: A_t + V(s_t).
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, done: Tensor, start: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted sum of each episode's past rewards: R_t = gamma R_{t-1} + r_t; reset to zero when the episode ends.

    Args:
        rewards: (T, N). done: (T, N) bool. start: R before the first step (N,). gamma: discount.

    Returns:
        R_t of every step (T, N), and the start of the next rollout (N,).
    """
    returns = torch.empty_like(rewards)
    running = start
    for t in range(rewards.shape[0]):
        running = running * gamma + rewards[t]
        returns[t] = running
        running = running * (~done[t])
    return returns, running


def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """1 - Var(targets - values) / Var(targets): 1 is perfect, 0 no better than the mean. 0 for constant targets."""
    variance = targets.var(correction=0)
    return torch.where(variance == 0, 0.0, 1 - (targets - values).var(correction=0) / variance)
