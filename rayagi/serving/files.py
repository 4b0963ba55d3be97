"""Atomic dataset files. Each is written under a temporary name, flushed, listed in the manifest and renamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from collectives.files import sync_path
from placement.unfinished import remove_unfinished, unfinished_beside
from rayagi.run.errors import disk_errors
from rayagi.serving.column_layout import EndedEpisode
from rayagi.serving.errors import ExportError
from rayagi.serving.program import FileFormat
from rayagi.serving.statistics import FileStatistics

_GROUP_BYTES = 16 * 2**20
"""Rows are buffered up to this size, then written as one Parquet row group or Arrow record batch."""
_HINT = "free space there, or serve to another folder with --out"


class RotatingFiles:
    """Writes rows to one file after another. After an error it writes no more; complete files stay.

    ``complete`` is called with a file's name and statistics, after its content is on the disk and before it is renamed.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        file_format: FileFormat,
        schema: pa.Schema,
        *,
        rows_per_file: int,
        bytes_per_file: int,
        complete: Callable[[str, FileStatistics], None],
    ) -> None:
        self._folder, self._prefix, self._format, self._schema = folder, prefix, file_format, schema
        self._rows_per_file, self._bytes_per_file = rows_per_file, bytes_per_file
        self._complete = complete
        self._number = 0
        self._open: _OpenFile | None = None

    def write(self, batch: pa.RecordBatch, ended: Sequence[EndedEpisode]) -> None:
        """Add rows, and begin another file when this one is full.

        Raises:
            DiskError: the disk is full or read-only. The unfinished file is removed; complete files stay.
        """
        while batch.num_rows:
            if self._open is None:
                self._open = _OpenFile(self._folder, self._name(), self._format, self._schema)
            part = batch.slice(0, self._rows_per_file - self._open.statistics.rows)
            batch = batch.slice(part.num_rows)
            # Episodes are counted in the file that holds their last row.
            last = set(_numbers_of_ended(part))
            self._try(self._open, part, [episode for episode in ended if episode.number in last])
            if self._open.statistics.rows >= self._rows_per_file or self._open.size >= self._bytes_per_file:
                self.close()

    def close(self) -> None:
        """Complete the last file. Safe to call twice.

        Raises:
            DiskError: it could not be written, and is removed.
        """
        file, self._open = self._open, None
        if file is None:
            return
        with disk_errors(file.path, _HINT):
            try:
                # Order matters: content on disk, then the manifest line, then the name that makes the line valid.
                file.finish()
                self._complete(file.path.name, file.statistics)
                file.unfinished.rename(file.path)
                sync_path(self._folder)
            except BaseException:
                file.discard()
                raise
        self._number += 1

    def _try(self, file: _OpenFile, part: pa.RecordBatch, ended: Sequence[EndedEpisode]) -> None:
        with disk_errors(file.path, _HINT):
            try:
                file.add(part, ended)
            except BaseException:
                self._open = None
                file.discard()
                raise

    def _name(self) -> str:
        return f"{self._prefix}-{self._number:05d}.{self._format}"


@contextmanager
def finished_folder(out: Path) -> Iterator[Path]:
    """A temporary folder (absolute path), renamed to ``out`` when the block succeeds and removed when it fails.

    Raises:
        ExportError: ``out`` exists already.
        DiskError: it cannot be written.
    """
    with _renamed(out, "folder") as unfinished:
        unfinished.mkdir()
        yield unfinished


@contextmanager
def finished_file(out: Path) -> Iterator[Path]:
    """A temporary file's path; the same as ``finished_folder`` of a file."""
    with _renamed(out, "file") as unfinished:
        yield unfinished
        sync_path(unfinished)


@contextmanager
def _renamed(out: Path, what: str) -> Iterator[Path]:
    _check_free(out, what)
    unfinished = unfinished_beside(out)
    try:
        # The error says how much space is free, which it is before the unfinished one is removed.
        with disk_errors(out, "free space there, or choose another folder"):
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
            _check_free(out, what)  # another process may have made it meanwhile
            unfinished.rename(out)
    finally:
        remove_unfinished(unfinished)


def _check_free(out: Path, what: str) -> None:
    if os.path.lexists(out):  # a link to nothing too
        raise ExportError(str(out), f"exists already; choose another {what}")


class _OpenFile:
    """A file under its temporary name. Readers ignore it, since the name begins with a dot."""

    def __init__(self, folder: Path, name: str, file_format: FileFormat, schema: pa.Schema) -> None:
        self.path = folder / name
        self.unfinished = folder / f".{name}.unfinished"
        self.statistics = FileStatistics()
        self._schema = schema
        self._buffered: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        with disk_errors(self.path, _HINT):
            # Python's own file object: its errors keep errno.
            self._file = self.unfinished.open("wb")
            try:
                self._writer: Any = (
                    pq.ParquetWriter(self._file, schema, compression="zstd")
                    if file_format == "parquet"
                    else pa.ipc.new_file(self._file, schema)
                )
            except BaseException:
                self._file.close()
                self.unfinished.unlink(missing_ok=True)
                raise

    @property
    def size(self) -> int:
        """Bytes so far: written and buffered."""
        return self._file.tell() + self._buffered_bytes

    def add(self, batch: pa.RecordBatch, ended: Sequence[EndedEpisode]) -> None:
        """Buffer rows, and write them when there are enough."""
        values = batch.column("obs").flatten().to_numpy().reshape(batch.num_rows, -1)
        self.statistics.add(
            torch.from_numpy(values.astype(np.float64)),
            ended,
            last_episode=pc.max(batch.column("episode")).as_py(),
        )
        self._buffered.append(batch)
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes >= _GROUP_BYTES:
            self._write_buffered()

    def finish(self) -> None:
        """Flush everything to the disk."""
        self._write_buffered()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.statistics.bytes = self._file.tell()
        self._file.close()

    def discard(self) -> None:
        """Close and remove the file."""
        with suppress(Exception):  # fails if the file failed
            self._writer.close()
        with suppress(OSError):
            self._file.close()
        self.unfinished.unlink(missing_ok=True)

    def _write_buffered(self) -> None:
        if not self._buffered:
            return
        table = pa.Table.from_batches(self._buffered, self._schema).combine_chunks()
        self._writer.write_table(table)
        self._buffered, self._buffered_bytes = [], 0


def _numbers_of_ended(batch: pa.RecordBatch) -> list[int]:
    done = pc.or_(batch.column("terminated"), batch.column("truncated"))
    numbers: list[int] = batch.column("episode").filter(done).to_pylist()
    return numbers
