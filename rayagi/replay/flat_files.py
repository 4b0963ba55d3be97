"""Writes files with a row per step and one array per column: D4RL's HDF5, torch tensors."""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayagi.replay.flat import D4RL_NAMES, OUR_NAMES, TRAJECTORY, import_h5py
from rayagi.replay.trajectories import Source, TrajectoryBatch, is_obs
from rayagi.serving.errors import ExportError
from rayagi.serving.files import finished_file

_ROWS, _BYTES = 8192, 2**20
"""A chunk of HDF5: so many rows, or bytes of a column."""


def write_d4rl(source: Source, out: Path, batches: Iterator[TrajectoryBatch]) -> None:
    """Write D4RL's HDF5, with ``next_observations``; further columns, and trajectories' numbers, are in ``infos``.

    Raises:
        ExportError: the file exists, observations have several parts, a name is taken, or h5py is not installed.
        DiskError: it cannot be written; nothing of it is left.
    """
    h5py = import_h5py(out)
    kinds = _kinds(source)
    if "obs" not in kinds:
        raise ExportError(str(source.path), "has observations of several parts: export it to minari or torch")
    with finished_file(out) as unfinished, _FileOfHdf5(unfinished, "w+") as written:
        with h5py.File(written, "w") as file:
            for name, (dtype, shape) in kinds.items():
                theirs = D4RL_NAMES.get(name, f"infos/{name}")
                chunks = (_rows(dtype, shape), *shape)
                file.create_dataset(theirs, (0, *shape), dtype, maxshape=(None, *shape), chunks=chunks)

            def append(name: str, values: NDArray[Any]) -> None:
                dataset = file[D4RL_NAMES.get(name, f"infos/{name}")]
                dataset.resize(dataset.shape[0] + len(values), 0)
                dataset[-len(values) :] = values
                written.check()

            _write_rows(batches, append)
        written.check()


class _FileOfHdf5(io.FileIO):
    """A file whose first error is kept, and raised by ``check``. Nothing is written after it.

    HDF5 tries to write again when its objects are closed: on a full disk each prints a traceback, and the process may crash.
    """

    _error: OSError | None = None

    def write(self, data: Any) -> int:
        """All of it, unless there was an error."""
        rest = memoryview(data).cast("B")
        try:
            while len(rest) and self._error is None:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._error = error
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """Set the size, unless there was an error."""
        try:
            if self._error is None:
                super().truncate(size)
        except OSError as error:
            self._error = error
        return size or 0

    def check(self) -> None:
        """Raise the error, if there was one."""
        if self._error is not None:
            raise self._error


def write_tensors(source: Source, out: Path, batches: Iterator[TrajectoryBatch]) -> None:
    """Write a dict of tensors by our names, with ``next_obs`` (or ``next_obs.PART`` of all parts) and trajectories' numbers.

    Arguments and errors as of ``write_d4rl``; observations may have several parts.

    The tensors are put together in unnamed files beside it, not in memory.
    """
    import torch  # imported here: a second, which other formats do not need

    kinds, steps, at = _kinds(source), source.num_steps, dict[str, int]()
    with finished_file(out) as unfinished:
        arrays = {
            name: _on_disk(unfinished.parent, (steps, *shape), dtype)
            for name, (dtype, shape) in kinds.items()
        }

        def append(name: str, values: NDArray[Any]) -> None:
            begin = at.get(name, 0)
            at[name] = begin + len(values)
            arrays[name][begin : at[name]] = values

        _write_rows(batches, append)
        tensors = {name: torch.from_numpy(array[: at[name]]) for name, array in arrays.items()}
        try:
            with unfinished.open("wb") as file:
                torch.save(tensors, file)
        except RuntimeError as error:
            if isinstance(
                error.__context__, OSError
            ):  # such as a full disk, of which torch's own error says nothing
                raise error.__context__ from error
            raise


def _on_disk(folder: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserved, since a write into a mapped file that finds the disk full would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(1, math.prod(shape) * np.dtype(dtype).itemsize))
        return np.memmap(file, dtype, "r+", shape=shape)


def _kinds(source: Source) -> Mapping[str, tuple[Any, tuple[int, ...]]]:
    kinds = {column.name: (column.dtype, column.shape) for column in source.schema.columns}
    added = {f"next_{name}": kind for name, kind in kinds.items() if is_obs(name)}
    added[TRAJECTORY] = (np.dtype(np.int64), ())
    if taken := [name for name in kinds if name in added or {name, f"infos/{name}"} & OUR_NAMES.keys()]:
        raise ExportError(
            str(source.path),
            f"has the columns {', '.join(taken)}, names that d4rl and torch files have for others: export it to minari",
        )
    return {**kinds, **added}


def _rows(dtype: Any, shape: tuple[int, ...]) -> int:
    """Rows of a column in a chunk."""
    return max(1, min(_ROWS, _BYTES // max(1, math.prod(shape) * np.dtype(dtype).itemsize)))


def _write_rows(batches: Iterator[TrajectoryBatch], append: Callable[[str, NDArray[Any]], None]) -> None:
    """Call ``append`` for each column with the rows of each batch."""
    count = 0
    for batch in batches:
        for name, values in batch.columns.items():
            append(name, batch.shifted(name) if is_obs(name) else values)
            if is_obs(name):
                append(f"next_{name}", batch.shifted(name, 1))
        append(TRAJECTORY, count + batch.owners)
        count += len(batch.lengths)
