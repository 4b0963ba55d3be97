"""GAE, V-trace, discounted returns and explained variance: pure functions of a rollout, time first."""

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


def vtrace(
    *,
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    trace_lambda: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and advantages (Espeholt et al. 2018, §4.1).

    Equation 1, in the recursive form of remark 1, with the lambda of remark 2:

    rho_t   = min(rho_bar, pi_t / mu_t),  c_t = lambda min(c_bar, pi_t / mu_t)
    delta_t = rho_t (r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t))
    v_t     = V(s_t) + delta_t + gamma c_t (1 - done_t) (v_{t+1} - V(s_{t+1}))
    A_t     = r_t + gamma (1 - terminated_t) V(s'_t) + gamma lambda (1 - done_t) (v_{t+1} - V(s_{t+1})) - V(s_t)

    With lambda = 1, A_t is the paper's r_t + gamma v_{t+1} - V(s_t) (§4.2). The caller weights it by rho_t in the policy
    gradient. For equal policies and bounds of at least 1, the results equal GAE's targets and advantages.

    Args:
        log_ratios: log (pi / mu) of each action: target policy over behaviour policy                (T, N)
        rewards: reward after each action                                                            (T, N)
        values: V(s_t)                                                                               (T, N)
        next_values: V(s'_t), of the state after the action, before any reset                        (T, N)
        terminated: the task ended; no bootstrap                                                     (T, N) bool
        done: terminated or truncated; the trace stops here                                          (T, N) bool
        gamma: discount per step.
        trace_lambda: decay of the trace; 1 is the paper's V-trace.
        rho_bar: upper bound of the ratios in delta; it sets the policy whose values are the fixed point.
        c_bar: upper bound of the ratios in the trace; it sets the speed of convergence.

    Returns:
        advantages and value targets v, each (T, N).
    """
    ratios = log_ratios.exp()  # pi_t / mu_t
    # TD error without importance weight: r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t).
    errors = rewards + gamma * next_values * (~terminated) - values
    # delta_t = rho_t * TD error, with rho_t = min(rho_bar, pi_t / mu_t).
    deltas = ratios.clamp(max=rho_bar) * errors
    # c_t = lambda min(c_bar, pi_t / mu_t) (remark 2).
    traces = trace_lambda * ratios.clamp(max=c_bar)
    # gamma (1 - done_t): no trace runs into the next episode.
    follows = gamma * (~done).to(rewards.dtype)
    advantages, corrections = torch.empty_like(rewards), torch.empty_like(rewards)
    # v_{t+1} - V(s_{t+1}); zero after the last step, whose successor has no correction.
    correction = torch.zeros_like(rewards[0])
    for t in range(rewards.shape[0] - 1, -1, -1):
        # A_t = TD error + gamma lambda (1 - done_t) (v_{t+1} - V(s_{t+1})); uses the successor's correction (§4.2).
        advantages[t] = errors[t] + trace_lambda * follows[t] * correction
        # Eq. 1 in recursive form (remark 1): v_t - V(s_t) = delta_t + gamma c_t (1 - done_t) (v_{t+1} - V(s_{t+1})).
        correction = deltas[t] + follows[t] * traces[t] * correction
        corrections[t] = correction
    return advantages, values + corrections


def importance_metrics(log_ratios: Tensor, rho_bar: float | None) -> dict[str, float]:
    """Mean of the ratios pi / mu and, where V-trace truncates them at ``rho_bar``, the share that it truncates."""
    ratios = log_ratios.exp()
    found = {"importance_ratio": float(ratios.mean())}
    if rho_bar is not None:
        found["importance_truncated"] = float((ratios > rho_bar).float().mean())
    return found
