"""What a shard is asked, by its own process or by others: the arguments and results are numbers, texts and arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.candidates import Numbers, Order
from actors.replay.errors import ReplayError
from actors.replay.layout import MOST_ROWS
from actors.replay.rows import Keys
from actors.replay.store import ReplayStore
from actors.replay.subscriptions import Gatherer, Subscription
from actors.replay.tree import Floats, Integers
from placement.errors import counted

Generations = NDArray[np.uint64]
_PATIENCE_S = 0.5
"""Longest wait of a request for the rate limiter."""


def _known(store: ReplayStore, tree: int) -> int:
    """The number of a tree. Raises ReplayError where there is none of this number."""
    if not 0 <= tree < len(store.specs):
        raise ReplayError(f"tree {tree} was requested of a store with {len(store.specs)} trees")
    return tree


def _candidates(
    store: ReplayStore, order: Sequence[Any], k: int, numbers: Sequence[int], taken: Integers
) -> tuple[NDArray[Any], ...]:
    return store.candidates(Order(*order), k, Numbers(*numbers), taken)


def _edges(store: ReplayStore, tree: int) -> tuple[NDArray[Any], ...]:
    edges = store.edges(_known(store, tree))
    return edges.first, edges.last, edges.children


def _descend(
    store: ReplayStore, tree: int, level: Integers, number: Integers, rest: Floats
) -> tuple[NDArray[Any], ...]:
    levels, numbers = np.ascontiguousarray(level, np.int64), np.ascontiguousarray(number, np.int64)
    targets = np.ascontiguousarray(rest, np.float64)
    if not levels.shape == numbers.shape == targets.shape == (len(targets),):
        raise ReplayError(
            f"levels {list(levels.shape)}, nodes {list(numbers.shape)} and targets {list(targets.shape)} were given: "
            "give (n,) of each"
        )
    # Nodes of tables of at most MOST_ROWS: no shift overflows.
    exist = (levels >= 0) & (levels < kernel.MAX_LEVELS) & (numbers >= 0)
    small = bool(exist.all() and (numbers <= MOST_ROWS >> 3 * levels).all())
    first, last = numbers << 3 * levels, ((numbers + 1) << 3 * levels) - 1
    end = store.base + store.capacity
    if len(targets) and not (small and store.base <= first.min() and last.max() < end):
        raise ReplayError(
            f"nodes of other shards than {store.base // store.capacity} were given: ask their owners"
        )
    return store.descend(_known(store, tree), levels, numbers, targets)[:5]


def _draw(store: ReplayStore, tree: int, n: int, *numbers: int) -> tuple[NDArray[Any] | None, ...]:
    if store.num_shards != 1 or not 1 <= n <= MOST_ROWS or len(numbers) != 4:
        raise ReplayError(
            f"a draw of {counted(n, 'row')} by {counted(len(numbers), 'number')} from a table of "
            f"{counted(store.num_shards, 'shard')}: give 1 to {MOST_ROWS}, four numbers, and ask the only shard of a table"
        )
    return store.draw(_known(store, tree), n, *numbers)


def _draws_left(store: ReplayStore, tree: int, most: int) -> int:
    return store.draws_left(_known(store, tree), most)


def _leaves(store: ReplayStore, tree: int) -> tuple[NDArray[np.uint8], Floats]:
    rows, leaves = store.leaves(_known(store, tree))
    return rows.view(np.uint8), leaves


def _gather(
    store: ReplayStore,
    indices: Integers,
    generations: Generations,
    steps: Integers,
    subscriptions: Sequence[Sequence[Any]],
) -> tuple[NDArray[np.uint8], list[Any], list[Any]]:
    """Which rows are valid, and the values and masks of each subscription."""
    gatherer = Gatherer(store, [Subscription.from_json(found) for found in subscriptions], len(indices))
    valid = gatherer.copy(indices, generations, steps)
    return valid, list(gatherer.values.values()), list(gatherer.masks.values())


def _insert(store: ReplayStore, rows: Mapping[str, NDArray[Any]], *statistics: Any) -> tuple[Any, ...]:
    """Insert; a client whose shard did not respond for longer would take it for lost, and asks again instead."""
    end_s = time.monotonic() + _PATIENCE_S
    return store.insert(rows, *statistics, keep_waiting=lambda: time.monotonic() < end_s)


CALLS: Mapping[str, Callable[..., Any]] = {
    "rows": len,
    "edges": _edges,
    "descend": _descend,
    "draw": _draw,
    "draws_left": _draws_left,
    "candidates": _candidates,
    "leaves": _leaves,
    "mark": lambda store, indices, generations: store.mark(Keys(indices, generations)),
    "unmark": lambda store, indices, generations: store.unmark(Keys(indices, generations)),
    "gather": _gather,
    "insert": _insert,
    "update": lambda store, indices, generations, priorities: store.update_priorities(
        Keys(indices, generations), priorities
    ),
    "delete": lambda store, indices, generations: store.delete(Keys(indices, generations)),
    "prefetch": lambda store, indices, generations: store.prefetch(Keys(indices, generations)),
    "status": lambda store: store.snapshot().view(np.uint8),
    "counters": ReplayStore.counters,
    "metrics": lambda store: store.metrics().to_message(),
    "error": lambda store: store.limiter.shard_error(),
    "shift_error": lambda store, shift: store.limiter.shift_error(float(shift)),
}
"""By name."""
