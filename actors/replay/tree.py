"""Sums over groups of indices: the layout of a tree, its readable descent, and the merge of the trees of several shards.

Node j of level l holds the sum of leaves j * 8**l to (j + 1) * 8**l - 1, by *global* index. The trees of shards are pieces
of one tree, and only the nodes at their edges are shared. Sums of 8 children are added in one order, so that the merged tree
has the same bits as the tree of a single store with all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.replay.kernel import FANOUT

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Groups = Mapping[tuple[int, int], Floats]
"""Children of nodes, by level and number of the node: (FANOUT,) each."""


@dataclass(frozen=True, slots=True)
class Edges:
    """The first and last node of each level of one shard's tree.

    Attributes:
        first, last: numbers of these nodes by level, (levels,)
        children: (levels, 2, FANOUT); level 0 has none
    """

    first: Integers
    last: Integers
    children: Floats


def merge(shards: Iterable[Edges]) -> dict[tuple[int, int], Floats]:
    """The groups at the shards' edges as they are in the tree of all shards, the root's included."""
    merged: dict[tuple[int, int], Floats] = {}
    for shard in shards:
        for level in range(1, len(shard.first)):
            # A child lies in one shard, and is 0 in the others; or it is at an edge itself, and replaced below.
            for side, number in enumerate(dict.fromkeys((int(shard.first[level]), int(shard.last[level])))):
                held = merged.setdefault((level, number), np.zeros(FANOUT))
                held += shard.children[level, side]
    for level, number in sorted(merged):
        for child in range(FANOUT):
            below = merged.get((level - 1, FANOUT * number + child))
            if below is not None:
                merged[level, number][child] = total(below)
    return merged


def total(children: Floats) -> float:
    """Sum of a group in the kernel's order of additions."""
    return float(np.cumsum(children)[-1])


def targets_of(u: Floats, everything: float) -> Floats:
    """Uniform numbers times the sum of all leaves, below it.

    A subnormal sum is a whole number of 2^-1074, and so are those in it: the target is the product's whole part, since
    rounding to the nearest would favour the last rows.
    """
    targets = u * everything
    if everything < np.finfo(np.float64).tiny:
        targets = np.ldexp(np.floor(u * np.ldexp(everything, 1074)), -1074)
    return np.minimum(targets, np.nextafter(everything, 0.0))


def descend(groups: Groups, top: int, targets: Floats) -> tuple[Integers, Integers, Floats]:
    """Go down from node 0 of level ``top`` to the node that holds each target, until a node is not in ``groups``.

    With the groups of a whole tree this is the reference of the kernel's draws. ``targets`` (n,) are at least 0 and
    less than the sum of all leaves. Returns level and number of each target's node, and the rest of the target within
    it, (n,) each.
    """
    level = np.full(len(targets), top)
    number = np.zeros(len(targets), np.int64)
    rest = targets.copy()
    for height in range(top, 0, -1):
        for node in np.unique(number[level == height]):
            children = groups.get((height, int(node)))
            if children is None:
                continue
            here = (level == height) & (number == node)
            # The last child c with s_0 + .. + s_(c-1) <= target.
            prefix = np.concatenate(([0.0], np.cumsum(children)[:-1]))
            child = (rest[here][:, None] >= prefix[1:]).sum(1)
            below = rest[here] - prefix[child]
            # Rounding may leave a rest that is as large as the child: the largest number below it instead.
            rest[here] = np.where(below < children[child], below, np.nextafter(children[child], 0.0))
            number[here] = FANOUT * node + child
            level[here] = height - 1
    return level, number, rest
