"""Counter-based random numbers of worlds, in integer tensor operations: equal on every engine, device and layout.

A world's numbers depend on (seed, global world index, episode, step) alone. Each key word is absorbed with SplitMix64
(Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014): a step of a Weyl sequence, then a mixing
function. compiled/worlds.h computes the same in C.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WEYL = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
START = -1
"""Value of ``steps`` for the random numbers of an episode's start."""


def uniform(seed: int, worlds: Tensor, episodes: Tensor, steps: Tensor | int, count: int) -> Tensor:
    """Uniform random numbers in [0, 1) of 24 bits, exact in float32 and float64.

    Args:
        worlds: global world indices     (M,) int64
        episodes: their episodes         (M,) int64
        steps: their steps, or START     (M,) int64
        count: numbers per world

    Returns:
        (M, count) float32.
    """
    # s1 = mix(world W + seed), s2 = mix(s1 + (episode + 1) W), s3 = mix(s2 + (step + 2) W), modulo 2^64
    state = _mixed(worlds * _WEYL + _signed(seed))
    state = _mixed(state + (episodes + 1) * _WEYL)
    moved = (steps + 2) * _WEYL
    state = _mixed(state + (_signed(moved) if isinstance(moved, int) else moved))
    # Number k = 1, 2, ...: the upper 24 bits of mix(s3 + k W), divided by 2^24
    counter = torch.arange(1, count + 1, device=worlds.device)
    bits = _shifted(_mixed(state.unsqueeze(-1) + counter * _WEYL), 40)
    return bits.to(torch.float32) * 2.0**-24


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's mixing function."""
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
