"""Which shard has which rows, so that most reads are local: pipeline-aware placement (GEAR, section 3.2).

Only the stage of a pipeline that has the input layer reads rows. Offline, the rows that are selected most often (of the
highest priorities) belong beside it. Online, rows are written beside their generator (``ReplayShards.insert``), and moved
when reads show the need. Every decision is logged with its reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.replay.errors import RateLimitedError, ReplayError
from actors.replay.kernel import COMMITTED
from actors.replay.rows import Keys, Selection, non_negative
from actors.replay.shards import ReplayShards
from actors.replay.subscriptions import Subscription, gather
from actors.replay.tree import Integers
from placement.errors import counted

_logger = logging.getLogger(__name__)
_LEAST_READS = 1000
"""Rows read from a shard, before the controller judges by them."""
_MOST_SHARE = 0.25
"""Of all reads: with fewer remote ones nothing is moved."""
_CHUNK = 64
"""Rows that are copied at a time."""


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """Shard of each row to be imported, and why.

    Attributes:
        shards: (n,)
        local_share: expected share of reads that are local, if rows are selected by priority**exponent
        reason: one sentence
    """

    shards: Integers
    local_share: float
    reason: str


def place_offline(
    priorities: ArrayLike,
    *,
    capacity: int,
    num_shards: int,
    input_shards: Sequence[int],
    exponent: float = 1.0,
) -> RowPlacement:
    """Place rows of a data set: those of the highest priorities beside the stage that reads inputs, the rest elsewhere.

    Args:
        priorities: of all rows, (n,)
        capacity, num_shards: of the table
        input_shards: shards on the hosts that run the pipeline's first stage
        exponent: of selection

    Raises:
        ReplayError: the rows do not fit into the table, or there is no such shard.
    """
    values = non_negative("priorities", priorities, np.size(priorities))
    first = list(dict.fromkeys(input_shards))
    if len(values) > capacity * num_shards:
        raise ReplayError(
            f"{counted(len(values), 'row')} for a table of "
            f"{counted(num_shards, 'shard')} of {capacity}: give it more capacity"
        )
    if not first or not all(0 <= shard < num_shards for shard in first):
        raise ReplayError(f"input_shards is {list(input_shards)}: give shards from 0 to {num_shards - 1}")
    order = np.argsort(-values, kind="stable")  # of equal ones, the first
    near = min(len(values), capacity * len(first))
    shards = np.empty(len(values), np.int64)
    # In turn, so that the shards beside the readers are read equally often.
    shards[order[:near]] = np.asarray(first)[np.arange(near) % len(first)]
    others = [shard for shard in range(num_shards) if shard not in first]
    if others:
        shards[order[near:]] = np.asarray(others)[np.arange(len(values) - near) % len(others)]
    largest = values.max(initial=0.0) or 1.0  # powers of 1 and less do not overflow
    weights = np.where(values > 0, values / largest, 0.0) ** exponent
    share = float(weights[order[:near]].sum() / weights.sum()) if weights.sum() else 1.0
    names = ", ".join(map(str, first))
    reason = (
        f"{near} of {len(values)} rows, of the highest priorities, are placed in shards {names} beside the stage that reads "
        f"inputs: {share:.0%} of reads by priority**{exponent:g} are local there"
    )
    _logger.info("replay placement: %s", reason)
    return RowPlacement(shards, share, reason)


@dataclass(frozen=True, slots=True)
class Move:
    """Rows that were moved, or not, and why.

    Attributes:
        source, target: shards
        rows: that were moved
        reason: one sentence
    """

    source: int
    target: int
    rows: int
    reason: str


class PlacementController:
    """Moves rows to the shards beside their reader, when most of the reads of another shard come from there."""

    def __init__(self, shards: ReplayShards, *, most_rows: int = 1024) -> None:
        """Decide for the reader that this process is, by ``shards.reads``. One decision moves at most ``most_rows``."""
        self._shards, self._most_rows = shards, most_rows
        self._counted: dict[int, int] = {}

    def rebalance(self) -> list[Move]:
        """Judge the reads since the last call, and move rows of the highest priorities if needed.

        Returns what was decided. Rows that are moved get new keys; none is lost: it is deleted where it was only after it
        was committed where it goes, so for a moment it may be selected twice.
        """
        reads = {shard: count - self._counted.get(shard, 0) for shard, count in self._shards.reads.items()}
        total, local = sum(reads.values()), list(self._shards.local)
        if total < _LEAST_READS or not local:  # too few, or nothing to move to
            return []
        self._counted = dict(self._shards.reads)
        present = set(self._shards.present)
        remote = {shard: count for shard, count in reads.items() if shard not in local and shard in present}
        moves = [
            self._decide(shard, count, total, local)
            for shard, count in sorted(remote.items(), key=lambda item: -item[1])
            if count > _MOST_SHARE * total
        ]
        for move in moves:
            _logger.info("replay placement: %s", move.reason)
        return moves

    def _decide(self, source: int, count: int, total: int, local: Sequence[int]) -> Move:
        held = self._shards.counters_by_shard()
        free = {
            shard: self._shards.capacity - held[shard]["count"] - held[shard]["writing"]
            for shard in local
            if shard in held
        }
        target = max(free, key=lambda shard: free[shard], default=-1)
        share = f"{count} of {total} rows that this process read ({count / total:.0%})"
        why = f"{share} came from shard {source} on another host"
        hosts = self._shards.reads_of(source)
        if max(hosts.values(), default=0) > 2 * hosts.get(self._shards.host_id, 0):
            return Move(
                source, target, 0, f"no row is moved, though {why}: a third host has read twice as many there"
            )
        if not free.get(target):  # full, or lost meanwhile
            return Move(
                source, target, 0, f"no row is moved, though {why}: no shard of this host has a free row"
            )
        chosen = self._highest(source, min(free[target], self._most_rows))
        moved = move_rows(self._shards, chosen, target)
        return Move(
            source, target, moved, f"{counted(moved, 'row')} of shard {source} moved to shard {target}: {why}"
        )

    def _highest(self, shard: int, most: int) -> Keys:
        """The rows of the highest priorities in a shard."""
        status = self._shards.status()
        status = status[(status["state"] == COMMITTED) & (status["index"] // self._shards.capacity == shard)]
        best = np.argsort(-status["priority"], kind="stable")[:most]
        return Keys(status["index"][best].copy(), status["generation"][best].copy())


def move_rows(shards: ReplayShards, keys: Keys, target: int) -> int:
    """Copy rows into another shard, with length, priority and timestamp, then delete them. Returns how many were moved.

    They get new keys, and count as not sampled. Rows that are overwritten or deleted before are left alone. If the target is
    full, it removes rows of its own. Where the rate limiter refuses rows, no more are moved: the caller may be who draws.

    Raises:
        ShardLostError: the target is lost; the rows that were not moved are still where they were.
    """
    status = {(int(row["index"]), int(row["generation"])): row for row in shards.status()}
    found = [status.get((int(index), int(generation))) for index, generation in zip(*keys, strict=True)]
    rows = [row for row in found if row is not None and row["state"] == COMMITTED]
    moved = 0
    with suppress(RateLimitedError):
        for at in range(0, len(rows), _CHUNK):
            moved += _move(shards, np.array(rows[at : at + _CHUNK]), target)
    return moved


def _move(shards: ReplayShards, rows: NDArray[Any], target: int) -> int:
    """Move one chunk of rows, given by their status."""
    keys, n, schema = Keys(rows["index"].copy(), rows["generation"].copy()), len(rows), shards.schema
    windows = [
        Subscription(column=column.name, length=schema.max_length + column.extra) for column in schema.columns
    ]
    everything = Selection(keys, np.zeros(n, np.int64), np.ones(n), np.ones(n, np.float32))
    batch = gather(shards, everything, windows)
    good = batch.current
    if not good.any():
        return 0
    shards.insert(
        {name: values[good] for name, values in batch.values.items()},
        *(rows[name][good].copy() for name in ("length", "priority", "timestamp")),
        shard=target,
        keep_waiting=lambda: False,
    )
    return shards.delete(Keys(keys.indices[good], keys.generations[good]))
