"""Who reduces which elements of a flat tensor."""

from __future__ import annotations

from itertools import pairwise

_ALIGN_ELEMENTS = 16
"""Shares begin on multiples of a cache line of float32, so that two members never write to one line."""


def shares(numel: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """[begin, end) of each rank's share: contiguous, in rank order, together all elements; empty where there are too few."""
    blocks = -(-numel // _ALIGN_ELEMENTS)
    bounds = [min(numel, _ALIGN_ELEMENTS * (blocks * rank // world_size)) for rank in range(world_size + 1)]
    return tuple(pairwise(bounds))
