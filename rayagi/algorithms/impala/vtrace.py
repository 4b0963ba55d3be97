"""V-trace: values and advantages from experience of another policy (Espeholt et al. 2018, §4.1)."""

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

    With lambda = 1, A_t is the paper's r_t + gamma v_{t+1} - V(s_t) (§4.2), to be weighted by rho_t in the policy's
    gradient. Where both policies are the same and the bounds at least 1, these are GAE's targets and advantages.

    Args:
        log_ratios: log (pi / mu) of each action: the policy that learns over the one that acted     (T, N)
        rewards: reward after each action                                                            (T, N)
        values: V of the state acted on                                                              (T, N)
        next_values: V of the state that the action led to, before any reset                         (T, N)
        terminated: the task ended; nothing follows                                                  (T, N) bool
        done: terminated or cut by the time limit; the trace stops here                              (T, N) bool
        gamma: discount per step.
        trace_lambda: decay of the trace; 1 is the paper's V-trace.
        rho_bar: upper bound of the ratios in delta; decides which policy's values these are.
        c_bar: upper bound of the ratios in the trace; decides how far it reaches.

    Returns:
        advantages and value targets v, each (T, N).
    """
    ratios = log_ratios.exp()
    errors = rewards + gamma * next_values * (~terminated) - values
    deltas = ratios.clamp(max=rho_bar) * errors
    traces = trace_lambda * ratios.clamp(max=c_bar)
    follows = gamma * (~done).to(rewards.dtype)
    advantages, corrections = torch.empty_like(rewards), torch.empty_like(rewards)
    correction = torch.zeros_like(
        rewards[0]
    )  # v_{t+1} - V(s_{t+1}); nothing corrects the value after the last step
    for t in range(rewards.shape[0] - 1, -1, -1):
        advantages[t] = errors[t] + trace_lambda * follows[t] * correction
        correction = deltas[t] + follows[t] * traces[t] * correction
        corrections[t] = correction
    return advantages, values + corrections
