"""Random numbers of worlds, alike on every engine, device and layout: counter-based, in integer tensor operations.

A world's numbers come from (seed, global world index, episode, step) alone. SplitMix64 (Steele, Lea, Flood: Fast splittable
pseudorandom number generators, OOPSLA 2014): a Weyl sequence, each of whose terms is mixed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WEYL = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
START = -1
"""In place of a step: the numbers that begin an episode."""


def uniform(seed: int, worlds: Tensor, episodes: Tensor, steps: Tensor | int, count: int) -> Tensor:
    """Uniform numbers in [0, 1) with 24 bits, which float32 and float64 hold alike.

    Args:
        worlds: global world indices     (M,) int64
        episodes: their episodes         (M,) int64
        steps: their steps, or START     (M,) int64
        count: numbers of each

    Returns:
        (M, count) float32.
    """
    state = _mixed(worlds * _WEYL + _signed(seed))
    state = _mixed(state + (episodes + 1) * _WEYL)
    moved = (steps + 2) * _WEYL
    state = _mixed(state + (_signed(moved) if isinstance(moved, int) else moved))
    counter = torch.arange(1, count + 1, device=worlds.device)
    bits = _shifted(_mixed(state.unsqueeze(-1) + counter * _WEYL), 40)
    return bits.to(torch.float32) * 2.0**-24


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _MIX_1
    z = (z ^ _shifted(z, 27)) * _MIX_2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own drags the sign along."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
