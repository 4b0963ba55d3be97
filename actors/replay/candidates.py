"""Selection by keys as one shard does it: its k rows with the least keys, of which the least of all shards are selected."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.kernel import address
from actors.replay.tree import Floats, Integers

_KEYS = 2
"""Stream of random numbers: one by global index."""


class Order(NamedTuple):
    """What the keys of rows are.

    Attributes:
        kind: oldest, newest: by timestamp; highest: by priority; random: log(-log(u) / priority**exponent)
        exponent: of random keys
    """

    kind: str
    exponent: float = 0.0


class Numbers(NamedTuple):
    """Position of one round of a draw among all random numbers."""

    seed: int
    draw: int
    round: int

    def uniforms(self, stream: int, first: int, count: int) -> Floats:
        """Numbers ``first`` to first + count - 1 of this round, (count,) in [0, 1). As NumPy's Philox."""
        out = np.empty(count)
        kernel.library().replay_uniforms(
            self.seed % 2**64, stream, self.round, self.draw % 2**64, first, count, address(out)
        )
        return out


class Candidates(NamedTuple):
    """The rows with the least keys, of a shard or of all, at most k.

    Attributes:
        keys: of any order, (n,)
        indices, generations: of the rows, (n,)
        weights: the rows' weights in a random order, (n,)
        lengths: of the rows, (n,)
        available: rows that can be selected, (1,)
    """

    keys: NDArray[Any]
    indices: Integers
    generations: NDArray[np.uint64]
    weights: Floats
    lengths: Integers
    available: Integers

    @classmethod
    def of(
        cls, rows: NDArray[Any], base: int, order: Order, k: int, numbers: Numbers, taken: Integers
    ) -> Self:
        """Those of one shard with this status table, without the global indices ``taken``, which were selected before."""
        tags = rows["tag"]
        selectable = (tags & np.uint64(3)) == kernel.COMMITTED
        is_random = order.kind == "random"
        if is_random:
            selectable &= rows["priority"] > 0
        local = np.flatnonzero(selectable)
        if is_random and rows["priority"][local].min(initial=np.inf) ** order.exponent == 0.0:  # too small
            local = local[_powers(rows[local], order.exponent) > 0]
        available = len(local)
        if len(taken):
            local = local[~np.isin(local + base, taken)]
        keys = _keys(rows, local, base, order, numbers)
        best = _least(keys, k)
        chosen = local[best]
        weights = _powers(rows[chosen], order.exponent if is_random else 0.0)
        lengths = rows["length"][chosen].astype(np.int64)
        generations = tags[chosen] >> np.uint64(2)
        return cls(keys[best], chosen + base, generations, weights, lengths, np.array([available]))

    @classmethod
    def merge(cls, shards: list[Self], k: int) -> Self:
        """The k least of all; of equal ones, the least index."""
        columns = [np.concatenate([shard[column] for shard in shards]) for column in range(6)]
        best = np.lexsort((columns[1], columns[0]))[:k]
        keys, indices, generations, weights, lengths = (column[best] for column in columns[:5])
        return cls(keys, indices, generations, weights, lengths, columns[5].sum(keepdims=True))


def _keys(rows: NDArray[Any], local: Integers, base: int, order: Order, numbers: Numbers) -> NDArray[Any]:
    """Keys of these rows; the least are selected."""
    if order.kind == "random":
        u = numbers.uniforms(_KEYS, base, len(rows))[local]
        with np.errstate(divide="ignore"):
            # log(-log(1 - u) / p**exponent): the logarithm has the order of the keys, and none overflows for the least p.
            # u = 0 gets -inf.
            return np.log(-np.log1p(-u)) - order.exponent * np.log(rows["priority"][local])
    column: NDArray[Any] = rows["priority" if order.kind == "highest" else "timestamp"][local]
    return column if order.kind == "oldest" else -column


def _powers(rows: NDArray[Any], exponent: float) -> Floats:
    with np.errstate(over="ignore"):  # the sum of all weights says so
        powers: Floats = np.where(rows["priority"] > 0, rows["priority"], 0.0) ** exponent
    return powers


def _least(keys: NDArray[Any], k: int) -> Integers:
    """Positions of the k least keys, in order; of equal ones, the first."""
    if len(keys) <= k:
        return np.argsort(keys, kind="stable")
    bound = np.partition(keys, k - 1)[k - 1]
    below = np.flatnonzero(keys < bound)
    best = np.concatenate((below, np.flatnonzero(keys == bound)[: k - len(below)]))
    return best[np.argsort(keys[best], kind="stable")]
