"""PPO's losses as pure functions (Schulman et al. 2017, eq. 7 and 9)."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(log_ratio: Tensor, advantages: Tensor, clip_ratio: float) -> Tensor:
    """-mean(min(r A, clip(r, 1 - eps, 1 + eps) A)) with r = exp(log_ratio). Arguments (B,), result a scalar."""
    ratio = log_ratio.exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_ratio, 1 + clip_ratio) * advantages).mean()


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, value_clip: float | None) -> Tensor:
    """Mean squared error; with ``value_clip``, the larger of it and the error of values kept that close to the old ones."""
    error = (values - targets).square()
    if value_clip is not None:
        kept = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.max(error, (kept - targets).square())
    return error.mean()


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Low-variance estimate of KL(old || new): mean((r - 1) - log r), never negative."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def clip_fraction(log_ratio: Tensor, clip_ratio: float) -> Tensor:
    """Share of samples whose ratio left [1 - eps, 1 + eps]."""
    return ((log_ratio.exp() - 1).abs() > clip_ratio).float().mean()


def adapted_learning_rate(learning_rate: float, kl: float, target_kl: float) -> float:
    """KL-adaptive step size: divide by 1.5 above twice the target, multiply by 1.5 below half of it; within [1e-5, 1e-2]."""
    if kl > 2 * target_kl:
        return max(1e-5, learning_rate / 1.5)
    if kl < target_kl / 2:
        return min(1e-2, learning_rate * 1.5)
    return learning_rate
