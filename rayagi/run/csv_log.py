"""Append-only CSV files. A partial last line is ignored; a resume cuts the rows after its checkpoint."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from placement.errors import counted
from rayagi.run.atomic import replace_text
from rayagi.run.errors import RunFolderError, disk_errors

Row = dict[str, float]
"""A row by column name; empty cells are left out."""


_ALWAYS = ("iteration", "env_steps_total", "train_s")
"""Columns that no row leaves empty."""


def read_rows(path: Path) -> list[Row]:
    """Rows written by ``CsvLog``, without a partial last line. A missing file has no rows.

    Raises:
        RunFolderError: something else changed the file; names file, line and column.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise RunFolderError(str(path), f"is not text: {error.reason} at byte {error.start}") from error
    header, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
    columns = header.split(",")
    missing = [column for column in _ALWAYS if column not in columns]
    if lines and missing:
        raise RunFolderError(f"{path}, line 1", f"the header has no column {', '.join(missing)}")
    return [_row(columns, line.split(","), f"{path}, line {number}") for number, line in enumerate(lines, 2)]


def _row(columns: Sequence[str], cells: Sequence[str], where: str) -> Row:
    if len(cells) != len(columns):
        raise RunFolderError(
            where,
            f"got {counted(len(cells), 'cell')}; expected {len(columns)}; correct the line, or delete it",
        )
    row = {}
    for column, cell in zip(columns, cells, strict=True):
        if cell or column in _ALWAYS:
            row[column] = number = _number(cell)
            if not math.isfinite(number):
                raise RunFolderError(
                    f"{where}, column {column}",
                    f"{cell!r} is not a finite number; correct the cell, or delete the line",
                )
    return row


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan


def read_columns(path: Path) -> list[str]:
    """Names of a file's columns; a missing file has none."""
    return next(csv.reader(path.open()), []) if path.exists() else []


def cell_text(value: float | None) -> str:
    """Integers without a decimal point, other numbers with seven digits, an empty text for None and NaN."""
    if value is None or not math.isfinite(value):
        return ""
    if float(value).is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.7g}"


class CsvLog:
    """Appends rows keyed by the column ``iteration``."""

    def __init__(self, path: Path, columns: Sequence[str], *, keep_through: int | None = None) -> None:
        """Open the file.

        Args:
            path: the file; created if it is missing.
            columns: its columns, ``iteration`` among them.
            keep_through: keep rows up to this iteration and remove later ones; None removes all rows.

        Raises:
            DiskError: the file cannot be written.
        """
        self._path, self.columns = path, tuple(columns)
        rows = [] if keep_through is None else read_rows(path)
        self._begin([row for row in rows if row["iteration"] <= (keep_through or 0)])

    def _begin(self, rows: Sequence[Row]) -> None:
        lines = [",".join(self.columns), *(self._line(row) for row in rows)]
        replace_text(self._path, "\n".join(lines) + "\n")
        with disk_errors(self._path):
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def add_columns(self, columns: Sequence[str]) -> None:
        """Add columns; earlier rows have empty cells there.

        Raises:
            DiskError: the file cannot be written.
        """
        self.close()
        self.columns += tuple(columns)
        self._begin(read_rows(self._path))

    def append(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Append rows.

        Raises:
            DiskError: the disk is full; a partial row is ignored when the file is next read.
        """
        content = "".join(self._line(row) + "\n" for row in rows).encode()
        with disk_errors(self._path):
            while content:
                content = content[os.write(self._descriptor, content) :]

    def close(self) -> None:
        """Fsync and close the file."""
        with disk_errors(self._path):
            os.fsync(self._descriptor)
            os.close(self._descriptor)

    def _line(self, row: Mapping[str, float | None]) -> str:
        return ",".join(cell_text(row.get(column)) for column in self.columns)
