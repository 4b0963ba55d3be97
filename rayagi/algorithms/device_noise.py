"""Exploration noise and minibatch orders drawn on the device, with a counter-based generator of integer operations.

The numbers differ from those of ``actors.noise``, but do not depend on the layout either: those of an environment are a
function of (seed, its index, iteration, step).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rayagi.envs.tasks.random_uniforms import uniform

# Added to the seed, so that these streams are disjoint from those of the tasks.
_EXPLORATION, _ORDER = 0x5DEECE66D0000001, 0x2545F4914F6CDD1D


def normal_noise(seed: int, envs: Tensor, iteration: Tensor, num_steps: int, dim: int) -> Tensor:
    """Standard normal numbers (Box and Muller 1958), (num_steps, N, dim) float32.

    Args:
        envs: global indices of the environments   (N,) int64
        iteration: of this rollout                 () int64
    """
    steps = torch.arange(num_steps, device=envs.device).unsqueeze(1)
    draws = uniform(seed + _EXPLORATION, envs, iteration, steps, 2 * dim)
    # Box-Muller: z = sqrt(-2 ln(1 - u1)) cos(2 pi u2).
    radius = torch.sqrt(-2.0 * torch.log(1.0 - draws[..., :dim]))
    return radius * torch.cos(2.0 * math.pi * draws[..., dim:])


def minibatch_orders(
    seed: int, envs: Tensor, iteration: Tensor, num_steps: int, num_epochs: int, num_minibatches: int
) -> Tensor:
    """Sample indices of each minibatch, (num_epochs, num_minibatches, T * N / num_minibatches), as in ``actors.noise``.

    Args:
        envs: global indices of the environments   (N,) int64
        iteration: of this update                  () int64
    """
    draws = torch.arange(num_epochs * num_steps, device=envs.device).unsqueeze(1)
    keys = uniform(seed + _ORDER, envs, iteration, draws, 1).view(num_epochs, num_steps, len(envs))
    steps = keys.argsort(dim=1, stable=True)
    columns = torch.arange(len(envs), device=envs.device)
    return (steps * len(envs) + columns).reshape(num_epochs, num_minibatches, -1)
