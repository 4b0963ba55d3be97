"""Saved replays: the checkpoints of ``actors.replay.checkpoint``, written by an import and read wherever a dataset is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.replay import Gatherer, Keys, ReplayStore, Selection, Subscription, kernel
from actors.replay.checkpoint import ReplayCheckpointer
from actors.replay.checkpoint_files import Manifest
from actors.replay.errors import ReplayCheckpointError
from actors.replay.schema import ReplaySchema
from placement.inventory import limits
from rayagi.replay.trajectories import Source, TrajectoryBatch, listed
from rayagi.run.errors import DiskError, disk_errors
from rayagi.serving.errors import DatasetError, ExportError


def saved_folder(path: Path) -> Path | None:
    """The checkpoint that a path stands for: itself, or the newest of a directory of them; None if there is none."""
    if (path / "manifest").is_file():
        return path
    finished = [each for each in path.iterdir() if each.name.isdecimal() and (each / "manifest").is_file()]
    return max(finished, key=lambda each: int(each.name), default=None)


def save(store: ReplayStore, out: Path) -> int:
    """Write a store's rows to a new folder. Returns its bytes.

    Raises:
        ExportError: the folder exists.
        DiskError: it cannot be written; nothing of it is left.
    """
    if os.path.lexists(out):
        raise ExportError(str(out), "exists already; choose another folder")
    with disk_errors(out, "choose another folder"):
        out.parent.mkdir(parents=True, exist_ok=True)
    try:
        return ReplayCheckpointer(store).write(out.absolute()).written_bytes
    except ReplayCheckpointError as error:
        if isinstance(error.__cause__, OSError):
            reason = error.__cause__.strerror or str(error.__cause__)
            raise DiskError(str(out), reason, "free space there, or choose another folder") from error
        raise


def restore(
    path: Path,
    columns: Sequence[str] = (),
    *,
    selectors: Sequence[Any] = (),
    memory_bytes: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> ReplayStore:
    """The store that was saved, with its rows, priorities and counters; ``columns`` are those that it must have.

    One shard of a table becomes a table of its own; a store that had a removal function removes the oldest commit first.

    Raises:
        DatasetError: it lacks a column.
        ReplayCheckpointError: it is missing or damaged.
        ReplayError: the store does not fit.
    """
    found = saved_folder(path)
    assert found is not None  # as ``loading.kind_of`` has found
    manifest = Manifest.read(found)
    schema = ReplaySchema.from_json(manifest.schema)
    known = [column.name for column in schema.columns]
    for name in columns:
        if name not in known:
            raise DatasetError(str(path), f"has no column {name!r}: its columns are {listed(known)}")
    store = ReplayStore.create(
        schema,
        manifest.capacity,
        selectors=selectors,
        removal="fifo" if manifest.removal == "user" else manifest.removal,
        max_times_sampled=manifest.max_times_sampled,
        memory_bytes=memory_bytes,
        folder=folder,
    )
    try:
        ReplayCheckpointer(store).read(found, as_table=True)
    except BaseException:
        store.close()
        raise
    return store


def open_saved(path: Path, columns: Sequence[str]) -> Source:
    """The rows of a saved replay in the order of their commits. All columns are read.

    Raises:
        DatasetError: it has no rows, or lacks a column.
        ReplayCheckpointError, ReplayError: as of ``restore``.
    """
    store = restore(path, columns, memory_bytes=limits.memory_bytes() // 2, folder=tempfile.gettempdir())
    source = replace(store_source(store, path), is_live=False)
    if not len(source.lengths):
        raise DatasetError(str(path), "is empty: it has no rows")
    return source


_BLOCK_BYTES = 8 * 2**20
"""Of rows that are copied at a time."""


def store_source(store: ReplayStore, path: Path) -> Source:
    """The rows of a store of one shard in the order of their commits, without those that are overwritten meanwhile.

    ``path``: what error messages call it.
    """
    status = store.status()
    rows = np.sort(status[status["state"] == kernel.COMMITTED], order="sequence")

    def begin() -> Iterator[TrajectoryBatch]:
        return (batch for _, batch in copied_rows(store, rows))

    return Source(
        path=path,
        kind="replay",
        schema=store.schema,
        lengths=rows["length"].copy(),
        begin=begin,
        is_live=True,
    )


def copied_rows(
    store: ReplayStore, rows: NDArray[Any]
) -> Iterator[tuple[NDArray[np.int64], TrajectoryBatch]]:
    """Global indices (n,) and trajectories of rows of the status table, without those that were overwritten since.

    Needs memory for a few megabytes of rows, or one row.
    """
    size = max(1, _BLOCK_BYTES // store.schema.row_bytes)
    for begin in range(0, len(rows), size):
        indices, batch = _copied(store, rows[begin : begin + size])
        if len(indices):
            yield indices, batch


def _copied(store: ReplayStore, rows: NDArray[Any]) -> tuple[NDArray[np.int64], TrajectoryBatch]:
    longest, columns = int(rows["length"].max()), store.schema.columns
    windows = [Subscription(column=column.name, length=longest + column.extra) for column in columns]
    ones = np.ones(len(rows))
    keys = Keys(rows["index"].copy(), rows["generation"].copy())
    selection = Selection(keys, np.zeros(len(rows), np.int64), ones, ones.astype(np.float32))
    values, _, current = Gatherer(store, windows, len(rows))(selection)
    found = {}
    for column in columns:
        ends = np.where(current, rows["length"] + column.extra, 0)
        found[column.name] = values[column.name][np.arange(longest + column.extra) < ends[:, None]]
    return rows["index"][current], TrajectoryBatch(found, rows["length"][current])
