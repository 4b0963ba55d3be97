"""PPO's losses and diagnostics as pure functions (Schulman et al. 2017, eq. 7 and 9)."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """PPO's clipped surrogate (eq. 7), negated. Arguments (B,), result a scalar.

    L = -mean(min(r A, clip(r, 1 - eps, 1 + eps) A)) with r = exp(log_ratio).
    """
    ratio = log_ratio.exp()  # r = pi(a|s) / pi_old(a|s)
    # The minimum is a lower bound of r A: a ratio outside the clip range gains nothing more (eq. 7).
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages).mean()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, value_clip: float | None) -> Tensor:
    """Mean squared error (L^VF in eq. 9), with an optional clip of the change from ``old_values``.

    Clipped: mean(max((V - V_target)^2, (V_old + clip(V - V_old, -eps, eps) - V_target)^2)).
    """
    error = (values - targets).square()
    if value_clip is not None:
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.max(error, (clipped - targets).square())
    return error.mean()


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Low-variance estimate of KL(old || new): mean((r - 1) - log r), never negative."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def clip_fraction(log_ratio: Tensor, clip_ratio: float) -> Tensor:
    """Fraction of samples whose ratio is outside [1 - eps, 1 + eps]."""
    return ((log_ratio.exp() - 1).abs() > clip_ratio).float().mean()


def adapted_learning_rate(learning_rate: float, kl: float, target_kl: float) -> float:
    """KL-adaptive learning rate, within [1e-5, 1e-2].

    Divides by 1.5 when the KL exceeds twice the target; multiplies by 1.5 when it is below half of it.
    """
    if kl > 2 * target_kl:
        return max(1e-5, learning_rate / 1.5)
    if kl < target_kl / 2:
        return min(1e-2, learning_rate * 1.5)
    return learning_rate
