"""Saved replays: the checkpoints of ``actors.replay.checkpoint``, written by an import and read wherever a dataset is."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.replay import ReplayStore
from actors.replay.checkpoint import ReplayCheckpointer
from actors.replay.checkpoint_files import Manifest
from actors.replay.schema import ReplaySchema
from placement.inventory import limits
from rayagi.replay.stored import store_source
from rayagi.replay.trajectories import Source
from rayagi.run.errors import disk_errors
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
        DiskError: the folder above it cannot be made.
        ReplayCheckpointError: it cannot be written; nothing of it is left.
    """
    if out.exists():
        raise ExportError(str(out), "exists already; choose another folder")
    with disk_errors(out, "choose another folder"):
        out.parent.mkdir(parents=True, exist_ok=True)
    return ReplayCheckpointer(store).write(out.absolute()).written_bytes


def restore(
    path: Path,
    columns: Sequence[str] = (),
    *,
    selectors: Sequence[Any] = (),
    memory_bytes: int | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> ReplayStore:
    """The store that was saved, with its rows, priorities and counters.

    Args:
        path: of the saved replay
        columns: that it must have
        selectors, memory_bytes, folder: as of ``ReplayStore.create``

    Raises:
        DatasetError: it lacks a column.
        ReplayCheckpointError: it is missing or damaged, or had a removal function.
        ReplayError: the store does not fit.
    """
    found = saved_folder(path)
    assert found is not None  # as ``loading.kind_of`` has found
    manifest = Manifest.read(found)
    schema = ReplaySchema.from_json(manifest.schema)
    known = [column.name for column in schema.columns]
    for name in columns:
        if name not in known:
            raise DatasetError(str(path), f"has no column {name!r}: its columns are {', '.join(known)}")
    store = ReplayStore.create(
        schema,
        manifest.capacity,
        selectors=selectors,
        removal=manifest.removal,
        max_times_sampled=manifest.max_times_sampled,
        memory_bytes=memory_bytes,
        folder=folder,
        shard=manifest.shard,
        num_shards=manifest.num_shards,
    )
    try:
        ReplayCheckpointer(store).read(found)
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
    source = replace(store_source(store, path), kind="replay")
    if not len(source.lengths):
        raise DatasetError(str(path), "is empty: it has no rows")
    return source
