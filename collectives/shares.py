"""Shares: the elements of a flat tensor that each rank reduces."""

from __future__ import annotations

from itertools import pairwise

_ALIGN_ELEMENTS = 16
"""Shares begin on multiples of a cache line of float32, so that two members never write to one line."""


def shares(numel: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each rank's share: contiguous, in rank order, covering all elements; some may be empty."""
    blocks = -(-numel // _ALIGN_ELEMENTS)
    bounds = [min(numel, _ALIGN_ELEMENTS * (blocks * rank // world_size)) for rank in range(world_size + 1)]
    return tuple(pairwise(bounds))
