"""Reads replay stores as sources: for exports, and for what looks at a store as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.replay import Gatherer, Keys, ReplayStore, Selection, Subscription, kernel
from rayagi.replay.trajectories import Source, Trajectory

_BLOCK_BYTES = 8 * 2**20
"""Of rows that are copied at a time."""


def store_source(store: ReplayStore, path: Path) -> Source:
    """The rows of a store in the order in which they were committed.

    Rows that others overwrite meanwhile are left out.

    Args:
        store: one shard
        path: what error messages call it
    """
    status = store.status()
    rows = np.sort(status[status["state"] == kernel.COMMITTED], order="sequence")

    def begin() -> Iterator[Trajectory]:
        for _, trajectory in copied_rows(store, rows):
            yield trajectory

    return Source(path=path, kind="replay", schema=store.schema, lengths=rows["length"].copy(), begin=begin)


def copied_rows(store: ReplayStore, rows: NDArray[Any]) -> Iterator[tuple[int, Trajectory]]:
    """Global index and trajectory of rows of the status table, without those that were overwritten since.

    Needs memory for a few megabytes of rows, or one row.
    """
    size = max(1, _BLOCK_BYTES // store.schema.row_bytes)
    for begin in range(0, len(rows), size):
        yield from _copied(store, rows[begin : begin + size])


def _copied(store: ReplayStore, rows: NDArray[Any]) -> Iterator[tuple[int, Trajectory]]:
    longest, columns = int(rows["length"].max()), store.schema.columns
    windows = [Subscription(column=column.name, length=longest + column.extra) for column in columns]
    ones = np.ones(len(rows))
    keys = Keys(rows["index"].copy(), rows["generation"].copy())
    selection = Selection(keys, np.zeros(len(rows), np.int64), ones, ones.astype(np.float32))
    values, _, current = Gatherer(store, windows, len(rows))(selection)
    for number in np.flatnonzero(current).tolist():
        steps = int(rows["length"][number])
        found = {column.name: values[column.name][number, : steps + column.extra] for column in columns}
        yield int(rows["index"][number]), found
