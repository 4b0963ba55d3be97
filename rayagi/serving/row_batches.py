"""Rows of Parquet and Arrow files, a few megabytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.dataset

_ROWS = 8192


def row_batches(
    rows: pyarrow.dataset.Dataset, columns: Sequence[str], most_rows: int = _ROWS
) -> Iterator[pa.RecordBatch]:
    """Batches of these columns, in the order of the rows.

    pyarrow would read 16 batches and 4 files ahead, and buffer whole row groups of Parquet: hundreds of megabytes of files
    whose rows are of 500 bytes.
    """
    options = {}
    if isinstance(rows.format, pyarrow.dataset.ParquetFileFormat):
        parquet = pyarrow.dataset.ParquetFragmentScanOptions(use_buffered_stream=True, pre_buffer=False)
        options = {"fragment_scan_options": parquet}
    return rows.to_batches(
        columns=list(columns), batch_size=most_rows, batch_readahead=1, fragment_readahead=1, **options
    )
