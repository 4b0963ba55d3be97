"""Counter-based random numbers of fused simulators: the same integers in torch and in every generated language.

PCG-4D (Jarzynski, Olano: Hash Functions for GPU Rendering, JCGT 9(3), 2020) maps four 32-bit words to four, in 32-bit
arithmetic that every language and vector unit has. The words are the counter: a number depends on seed, global environment
index, position (episode, or iteration) and step alone. There is no generator state, and the layout does not matter.

    x = global environment index    y = position    z = 4 * step + purpose    w = word of the seed + block * 0x9E3779B9

A block gives four numbers of 24 bits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Final

import torch
from torch import Tensor

START: Final = 0
"""Purpose: initial states. Position: the episode; step 0."""
EXPLORE: Final = 1
"""Purpose: exploration noise of a policy. Position: the iteration; step of the rollout."""
MULTIPLIER: Final = 1664525
INCREMENT: Final = 1013904223
BLOCK: Final = 0x9E3779B9
MAX_STEPS: Final = 2**30
_MASK = 0xFFFFFFFF


@cache
def seed_word(seed: int) -> int:
    """Hash of a seed of any size to a 32-bit word."""
    x, y, z, w = (seed & _MASK, (seed >> 32) & _MASK, 0x2545F491, 0x6C078965)
    words = tuple(torch.tensor(one, dtype=torch.int64) for one in (x, y, z, w))
    return int(pcg4d(*words)[0])


def pcg4d(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PCG-4D: four words to four; int64 tensors that hold 32-bit unsigned numbers."""
    x, y, z, w = ((one * MULTIPLIER + INCREMENT) & _MASK for one in (x, y, z, w))  # a step of an LCG
    x, y, z, w = _round(x, y, z, w)
    x, y, z, w = (one ^ (one >> 16) for one in (x, y, z, w))  # xorshift
    return _round(x, y, z, w)


def uniform(
    word: int, indices: Tensor, position: Tensor | int, step: Tensor | int, purpose: int, count: int
) -> Tensor:
    """Uniform random numbers in [0, 1) of 24 bits.

    Args:
        word: ``seed_word`` of the seed
        indices: global environment indices           int64, broadcast against the next two
        position: episode or iteration                int64
        step: below MAX_STEPS                         int64
        purpose: START or EXPLORE
        count: numbers per environment

    Returns:
        (..., count) float32.
    """
    index, place, at = torch.broadcast_tensors(
        indices,
        torch.as_tensor(position, device=indices.device),
        torch.as_tensor(step, device=indices.device),
    )
    x, y, z = index & _MASK, place & _MASK, (at * 4 + purpose) & _MASK
    blocks = [
        torch.stack(pcg4d(x, y, z, torch.full_like(x, (word + block * BLOCK) & _MASK)), -1)
        for block in range(math.ceil(count / 4))
    ]
    if not blocks:
        return torch.zeros((*x.shape, 0), device=indices.device)
    return (torch.cat(blocks, -1)[..., :count] >> 8).to(torch.float32) * 2.0**-24


def _round(x: Tensor, y: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A mixing round: each word gets a product of two others added, in sequence."""
    x = (x + y * w) & _MASK
    y = (y + z * x) & _MASK
    z = (z + x * y) & _MASK
    w = (w + y * z) & _MASK
    return x, y, z, w
