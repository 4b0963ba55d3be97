"""Writes a profile's events as an Arrow table, for pandas, Polars or DuckDB."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayagi.profiler.intervals import Ints
from rayagi.profiler.overlap import ProcessEvents, process_events, unix_minus_monotonic
from rayagi.profiler.trace import Category, Events, Profile

_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("process", _TEXT, nullable=False),
        pa.field("thread", pa.int64(), nullable=False),
        pa.field("category", _TEXT, nullable=False),
        pa.field("name", _TEXT, nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("depth", pa.uint8(), nullable=False),
        pa.field("iteration", pa.int32()),
    ]
)
"""A row is an event. ``thread`` is the kernel's id; times are on the first process's CLOCK_MONOTONIC, and the table's
metadata has ``unix_minus_monotonic_ns``; ``depth`` counts the calls around it; ``iteration`` is the number of an iteration.
"""

_NAMED = {int(each): each.name.lower() for each in Category}
_CATEGORIES = pa.array([_NAMED.get(number, f"category {number}") for number in range(256)])


def write_arrow(profile: Profile, file: BinaryIO, form: Literal["arrow", "parquet"]) -> int:
    """Write all events, a block at a time; returns how many.

    Raises:
        OSError: the file cannot be written.
        TraceError: a file of events cannot be read any more.
    """
    processes, _ = process_events(profile)
    names = _Names(processes)
    labels = pa.array([_utf8(each.label) for each in processes], pa.string())
    about = {
        "command": " ".join(profile.command),
        "unix_minus_monotonic_ns": str(unix_minus_monotonic(profile)),
    }
    schema = SCHEMA.with_metadata({key: _utf8(text) for key, text in about.items()})
    count = 0
    with _writer(file, schema, form) as writer:
        for number, process in enumerate(processes):
            for thread, events in _blocks(process):
                columns = [
                    pa.DictionaryArray.from_arrays(np.full(len(events), number, np.int32), labels),
                    pa.array(np.full(len(events), thread, np.int64)),
                    pa.DictionaryArray.from_arrays(events["category"].astype(np.int32), _CATEGORIES),
                    names.column(number, events["name"]),
                    pa.array(np.ascontiguousarray(events["start"])),
                    pa.array(np.ascontiguousarray(events["end"])),
                    pa.array(np.ascontiguousarray(events["depth"])),
                    pa.array(events["flags"].astype(np.int32), mask=events["category"] != Category.ITERATION),
                ]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                count += len(events)
    return count


def _writer(
    file: BinaryIO, schema: pa.Schema, form: Literal["arrow", "parquet"]
) -> AbstractContextManager[pa.RecordBatchFileWriter | pq.ParquetWriter]:
    if form == "parquet":
        return pq.ParquetWriter(file, schema, compression="zstd")
    return pa.ipc.new_file(file, schema)


def _blocks(process: ProcessEvents) -> Iterator[tuple[int, Events]]:
    """Each with its thread."""
    for thread in process.threads:
        for events in thread.blocks():
            if len(events):
                yield thread.trace.thread_id, events


class _Names:
    """One dictionary for the names of all processes: batches of a file have the same."""

    def __init__(self, processes: list[ProcessEvents]) -> None:
        used = [_names_of(process) for process in processes]
        texts = dict.fromkeys(text for names in used for text in names.values())
        places = {text: place for place, text in enumerate(texts)}
        self._dictionary = pa.array(list(texts), pa.string())
        self._ids = [np.array(sorted(names), np.uint32) for names in used]
        self._places = [
            np.array([places[names[number]] for number in sorted(names)], np.int32) for names in used
        ]

    def column(self, process: int, names: Ints) -> pa.DictionaryArray:
        """Names by the process's ids, (n,)."""
        at = np.searchsorted(self._ids[process], names)
        return pa.DictionaryArray.from_arrays(self._places[process][at], self._dictionary)


def _names_of(process: ProcessEvents) -> dict[int, str]:
    """Texts of the ids that events have, which are not all written where the disk was full."""
    ids: set[int] = set()
    for _, events in _blocks(process):
        ids.update(np.unique(events["name"]).tolist())
    return {number: _utf8(process.trace.name_of(number)) for number in ids}


def _utf8(text: str) -> str:
    """Names may hold halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode()
