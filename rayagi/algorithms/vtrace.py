"""V-trace: off-policy value targets and advantages (Espeholt et al. 2018, §4.1)."""

from __future__ import annotations

import torch
from torch import Tensor


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
    """V-trace targets (eq. 1, in the recursive form of remark 1, with the lambda of remark 2) and advantages.

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
