"""Fills replay stores from datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet

from actors.replay import ReplaySchema, ReplayStore
from rayagi.replay.flat import open_d4rl, open_tensors
from rayagi.replay.minari import downloaded, minari_folder, minari_hint, open_minari
from rayagi.replay.rllib import batch_files, open_batches, open_episodes
from rayagi.replay.robomimic import has_demonstrations, open_robomimic
from rayagi.replay.saved import open_saved, restore, saved_folder
from rayagi.replay.served import open_served
from rayagi.replay.tables import open_lerobot, open_steps, parquet_files
from rayagi.replay.trajectories import BATCH_BYTES, Progress, Source, cut, reading
from rayagi.serving.errors import DatasetError


def _open_hdf5(path: Path, columns: Sequence[str]) -> Source:
    return (open_robomimic if has_demonstrations(path) else open_d4rl)(path, columns)


_READERS: dict[str, Callable[[Path, Sequence[str]], Source]] = {
    "rayagi": open_served,
    "hdf5": _open_hdf5,
    "minari": open_minari,
    "lerobot": open_lerobot,
    "rllib episodes": open_episodes,
    "rllib steps": open_steps,
    "rllib batches": open_batches,
    "torch": open_tensors,
    "replay": open_saved,
}


def open_source(path: Path | str, *, columns: Sequence[str] = (), mask: str | None = None) -> Source:
    """Open a dataset of any known format.

    Args:
        path: file or folder, or a dataset in Minari's folder by its name, such as D4RL/pen/human-v2
        columns: to read beyond the usual ones (``trajectories``); parts of an observation (obs.PART): in place of all parts
        mask: of a file of robomimic: read the demonstrations that this mask lists; None: all

    Raises:
        DatasetError: it does not exist, is of no known format, empty or damaged, or lacks a column or the mask.
    """
    path = Path(path) if os.path.exists(path) else located(path)
    kind = kind_of(path)
    with reading(path, kind):
        if mask is None:
            return _READERS[kind](path, columns)
        if kind == "hdf5" and has_demonstrations(path):
            return open_robomimic(path, columns, mask)
    raise DatasetError(str(path), f"has no mask {mask!r}: only files of robomimic have masks")


def located(path: Path | str) -> Path:
    """Absolute path of a dataset, or of one in Minari's folder by its name; as given, if there is neither."""
    return Path(path).absolute() if os.path.exists(path) else downloaded(str(path)) or Path(path)


def kind_of(path: Path) -> str:
    """Name of the format of a file or folder.

    Raises:
        DatasetError: it does not exist, cannot be looked at, or is of no known format.
    """
    with reading(path, "a dataset"):
        return _kind_of(path)


def _kind_of(path: Path) -> str:
    if not path.exists():
        raise DatasetError(str(path), f"does not exist{minari_hint(path)}")
    if not path.is_dir() and not path.is_file():  # a pipe would never end
        raise DatasetError(str(path), "is no file or folder")
    kind = _kind_of_folder(path) if path.is_dir() else _SUFFIXES.get(path.suffix)
    if kind is None and (files := parquet_files(path)):
        with reading(path, "Parquet"):
            names = pyarrow.parquet.read_schema(files[0]).names
            kind = "rllib episodes" if "item" in names else "rllib steps"
    if kind is None and path.is_dir() and batch_files(path):
        kind = "rllib batches"
    if kind is None:
        reason = (
            "is of no known format: use a saved replay, a folder of rayagi serve, Minari, LeRobot or RLlib, or a file "
            ".hdf5 of D4RL or robomimic, .pt, or .parquet or .json of RLlib"
        )
        raise DatasetError(str(path), reason)
    return kind


_SUFFIXES = {".json": "rllib batches", ".hdf5": "hdf5", ".h5": "hdf5", ".pt": "torch", ".pth": "torch"}
"""Formats of one file."""


def _kind_of_folder(path: Path) -> str | None:
    if (path / "dataset.json").exists():
        return "rayagi"
    if saved_folder(path) is not None:
        return "replay"
    if (path / "meta" / "info.json").exists():
        return "lerobot"
    return "minari" if minari_folder(path) is not None else None


def load(
    path: Path | str,
    *,
    columns: Sequence[str] = (),
    mask: str | None = None,
    max_length: int | None = None,
    selectors: Sequence[Any] = (),
    memory_bytes: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    shard: int = 0,
    num_shards: int = 1,
    progress: Progress | None = None,
) -> ReplayStore:
    """A replay store with a dataset's trajectories, one a row, in the dataset's order.

    Memory is that of the store and of a few trajectories. Timestamps count the rows, from 0. A saved replay is restored as
    it was, unless it is to be cut or sharded; one shard of a table becomes a table of its own.

    Args:
        path, columns, mask: as of ``open_source``
        max_length: cut longer trajectories into pieces of so many steps, each with the observation after its last step;
            None: that of the longest
        selectors, memory_bytes, folder: as of ``ReplayStore.create``
        shard, num_shards: fill one shard of a table: rows shard * capacity to (shard + 1) * capacity - 1 of all rows
        progress: called after each batch of trajectories

    Raises:
        DatasetError: as of ``open_source``.
        ReplayError: the store does not fit, an argument is outside its range, or a saved replay is damaged.
    """
    path = Path(path) if os.path.exists(path) else located(path)
    if max_length is None and mask is None and num_shards == 1 and kind_of(path) == "replay":
        return restore(path, columns, selectors=selectors, memory_bytes=memory_bytes, folder=folder)
    source = open_source(path, columns=columns, mask=mask)
    schema = ReplaySchema(
        source.schema.columns, source.schema.max_length if max_length is None else max_length
    )
    rows = int((-(-source.lengths // schema.max_length)).sum())
    store = ReplayStore.create(
        schema,
        -(-rows // num_shards),
        selectors=selectors,
        memory_bytes=memory_bytes,
        folder=folder,
        shard=shard,
        num_shards=num_shards,
    )
    try:
        fill(store, source, progress)
    except BaseException:
        store.close()
        raise
    return store


def fill(store: ReplayStore, source: Source, progress: Progress | None = None) -> None:
    """Insert those rows of a source that belong to a store's shard.

    Raises:
        DatasetError: a trajectory differs from what the source announced.
        ReplayError: as of ``ReplayStore.insert``.
    """
    row = steps = 0
    end = store.base + store.capacity
    # A store that spills has space for some rows at a time.
    most = max(1, min(store.slots // 2, BATCH_BYTES // store.schema.row_bytes))
    for batch in source.batches():
        for rows, lengths in cut(batch, store.schema, most):
            numbers = np.arange(row, row + len(lengths))
            row += len(numbers)
            own = slice(*np.searchsorted(numbers, (store.base, end)))
            if numbers[own].size:
                own_rows = {name: values[own] for name, values in rows.items()}
                store.insert(own_rows, lengths[own], timestamps=numbers[own])
        steps += batch.num_steps
        if progress is not None:
            progress(steps, source.num_steps)
        if row >= end:
            return
