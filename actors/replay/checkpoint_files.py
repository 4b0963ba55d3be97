"""Files of one checkpoint of a replay store: JSON, and arrays of fixed types, with checksums. Nothing in them is executed.

manifest             SHA-256 of its second line, which is JSON: schema, sizes, counters, the caller's state, and SHA-256 of
                     all that follows
status.bin           a STATUS record for each index
queue.bin            free indices in the order of their use, uint32
segment_000001.bin   blocks: one row after the other, column after column, without what lies beyond their lengths; then
                     an ENTRY for each of these rows
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.replay.errors import ReplayCheckpointError
from actors.replay.limiter import struct_of
from actors.replay.schema import ReplaySchema

FORMAT, VERSION = "rayagi replay checkpoint", 1
MOST_SEGMENTS = 32
"""Of a checkpoint: of more, the smallest are written again as one."""
PASSES = 8
"""Status tables that are tried before rows that writers overwrite are left out."""
PIECE_BYTES = 2**23
"""Of blocks that are copied, written and checked at a time; a single row may be larger."""
STATUS = np.dtype(
    [
        *((name, "<u8") for name in ("generation", "sequence", "sampled")),
        ("priority", "<f8"),
        ("timestamp", "<i8"),
        ("length", "<u4"),
    ]
)
"""Of one index. Length 0: it has no row."""
ENTRY = np.dtype([("generation", "<u8"), ("index", "<u4"), ("length", "<u4")])
"""Of one row of a segment. The index is the shard's own."""
COUNTERS = (
    *("sequence", "random", "inserted", "selected", "evicted", "deleted", "reclaimed", "spilled"),
    "recovered",
)
"""Fields of kernel.c's header that are saved."""
_FLUSH_BYTES = 2**26
"""Written before they are flushed: the system does not keep a whole checkpoint in memory."""
_MOST_MANIFEST_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Bytes of a row with its own steps only: per_step * length + extra."""

    per_step: int
    extra: int

    @classmethod
    def of(cls, schema: ReplaySchema) -> RowSizes:
        """Of a store with this schema."""
        return cls(
            sum(column.step_bytes for column in schema.columns),
            sum(column.step_bytes * column.extra for column in schema.columns),
        )

    def __call__(self, lengths: NDArray[Any]) -> NDArray[np.int64]:
        """Bytes of rows of these lengths."""
        return self.per_step * lengths.astype(np.int64) + self.extra

    def pieces(self, lengths: NDArray[Any]) -> list[slice]:
        """Rows in order, in pieces of at most PIECE_BYTES, or of one row."""
        ends, cuts = np.cumsum(self(lengths)), [0]
        while cuts[-1] < len(ends):
            before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
            cut = int(np.searchsorted(ends, before + PIECE_BYTES, side="right"))
            cuts.append(max(cut, cuts[-1] + 1))
        return [slice(begin, end) for begin, end in itertools.pairwise(cuts)]


@dataclass(frozen=True, slots=True, eq=False)
class BlockSegment:
    """A finished file of blocks.

    Attributes:
        number: in its name
        entries: ENTRY of each row, in order
        pieces: rows and SHA-256 of each piece
        descriptor: of the file, for reading and for links from other checkpoints
    """

    number: int
    entries: NDArray[Any]
    pieces: tuple[tuple[int, str], ...]
    descriptor: int

    @property
    def name(self) -> str:
        """Of the file."""
        return segment_name(self.number)

    def link_into(self, folder: int) -> bool:
        """Name the file in another folder, too. False if the file system cannot, or the file was removed."""
        try:
            # Through /proc, the file is found wherever its folder was moved; the folder makes it follow that link.
            source = f"/proc/self/fd/{self.descriptor}"
            os.link(source, self.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
        except OSError:
            return False
        return True

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "number": self.number,
            "rows": len(self.entries),
            "entries": digest(self.entries),
            "pieces": self.pieces,
        }


def segment_name(number: int) -> str:
    """Name of a segment's file."""
    return f"segment_{number:06d}.bin"


class SegmentWriter:
    """Writes a segment piece by piece. Without rows there is no file."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number, self._file = folder, number, -1
        self._entries: list[NDArray[Any]] = []
        self._pieces: list[tuple[int, str]] = []
        self._unflushed = 0
        self.num_bytes = 0

    def add(self, entries: NDArray[Any], blocks: NDArray[np.uint8]) -> None:
        """Append the blocks of these rows. Raises OSError where they cannot be written."""
        if not len(entries):
            return
        if self._file < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._folder / segment_name(self._number), flags, 0o644)
        write_all(self._file, blocks)
        self._entries.append(entries)
        self._pieces.append((len(entries), digest(blocks)))
        self.num_bytes += len(blocks)
        self._unflushed += len(blocks)
        if self._unflushed >= _FLUSH_BYTES:
            self._flush()

    def finish(self) -> list[BlockSegment]:
        """Append the entries, and flush the file. Returns the segment, if there is one.

        Raises:
            OSError: it cannot be written.
        """
        if self._file < 0:
            return []
        entries = np.concatenate(self._entries)
        write_all(self._file, entries)
        self._flush()
        return [BlockSegment(self._number, entries, tuple(self._pieces), self._file)]

    def discard(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)

    def _flush(self) -> None:
        os.fsync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The JSON of a checkpoint.

    Attributes:
        schema: as values of JSON
        capacity, shard, num_shards: of the shard, and its place
        removal, max_times_sampled: rules by which rows disappear
        counters: COUNTERS of the header
        limiter: as of ``Limiter.state``
        state: the caller's
        status, queue: SHA-256
        free: entries of the queue
        segments: as of ``BlockSegment.to_json``
    """

    schema: Mapping[str, Any]
    capacity: int
    shard: int
    num_shards: int
    removal: str
    max_times_sampled: int
    counters: Mapping[str, int]
    limiter: Mapping[str, Any] | None
    state: Mapping[str, Any]
    status: str
    queue: str
    free: int
    segments: tuple[Mapping[str, Any], ...]

    def write(self, folder: Path) -> None:
        """Write and flush the file.

        Raises:
            ReplayCheckpointError: the caller's state is no JSON.
            OSError: it cannot be written.
        """
        values = {name: getattr(self, name) for name in self.__slots__}
        try:
            body = json.dumps({"format": FORMAT, "version": VERSION, **values}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ReplayCheckpointError(
                f"the state to be saved with a replay is no JSON ({error})"
            ) from error
        text = f"{digest(body.encode())}\n{body}\n"
        write_file(folder / "manifest", np.frombuffer(text.encode(), np.uint8))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the file. Raises ReplayCheckpointError where it is missing, damaged, or of another format."""
        text = read_file(folder, "manifest", most=_MOST_MANIFEST_BYTES).tobytes()
        first, _, body = text.partition(b"\n")
        if first.decode(errors="replace") != digest(body[:-1]) or not body.endswith(b"\n"):
            raise damaged(folder, "manifest does not match its checksum")
        try:
            values = json.loads(body)
            if values.pop("format") != FORMAT:
                raise ValueError("another format")
            version = values.pop("version")
            if version == VERSION:
                return cls(**values)._checked()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(folder, f"manifest is not one of a replay checkpoint ({error})") from error
        raise ReplayCheckpointError(
            f"replay checkpoint {folder} has version {version!r} where this version of rayagi reads {VERSION}"
        )

    def _checked(self) -> Manifest:
        """Itself, if everything has its type and range; ValueError else."""
        numbers = [self.capacity, self.shard, self.num_shards, self.max_times_sampled, self.free]
        numbers += [self.counters[name] for name in COUNTERS]
        if self.limiter is not None:
            struct_of(self.limiter)
        if len(self.segments) > MOST_SEGMENTS:
            raise ValueError("too many segments")
        for segment in self.segments:
            pieces = [rows for rows, _ in segment["pieces"]]
            numbers += [segment["number"], segment["rows"], *pieces]
            if segment["rows"] != sum(pieces):
                raise ValueError("a segment's pieces do not sum to its rows")
            if not 0 < segment["rows"] <= PASSES * self.capacity:
                raise ValueError("a segment has too many rows")
        if any(type(number) is not int or not 0 <= number < 2**64 for number in numbers):
            raise ValueError("a number is outside its range")
        if len({segment["number"] for segment in self.segments}) != len(self.segments):
            raise ValueError("a segment occurs twice")
        if not 0 < self.capacity < 2**31 or self.free > self.capacity or not isinstance(self.state, dict):
            raise ValueError("sizes do not match")
        ReplaySchema.from_json(self.schema)
        return self


def open_segment(folder: Path, found: Mapping[str, Any], sizes: RowSizes, max_length: int) -> BlockSegment:
    """Open a segment of a manifest, and check its entries; not yet its blocks.

    Raises:
        ReplayCheckpointError: it is missing, or damaged.
    """
    name, rows = segment_name(found["number"]), found["rows"]
    with ExitStack() as undo:
        descriptor, size = _open(folder, name)
        undo.callback(os.close, descriptor)
        begin = size - rows * ENTRY.itemsize
        if begin < 0:
            raise damaged(folder, f"{name} has {size} bytes, too few for {rows} rows")
        entries = np.empty(rows, ENTRY)
        _read_all(folder, name, descriptor, entries, begin)
        if digest(entries) != found["entries"]:
            raise damaged(folder, f"the entries of {name} do not match their checksum")
        lengths = entries["length"]
        if not 0 < lengths.min() <= lengths.max() <= max_length or sizes(lengths).sum() != begin:
            raise damaged(folder, f"{name} has {size} bytes, which do not match its rows")
        undo.pop_all()
    return BlockSegment(
        found["number"], entries, tuple((rows, sha) for rows, sha in found["pieces"]), descriptor
    )


def read_piece(
    folder: Path, segment: BlockSegment, number: int, at: int, size: int, buffer: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """The blocks of one piece, which begins at byte ``at``.

    Raises:
        ReplayCheckpointError: they do not match their checksum.
    """
    piece = buffer[:size]
    _read_all(folder, segment.name, segment.descriptor, piece, at)
    if digest(piece) != segment.pieces[number][1]:
        raise damaged(folder, f"piece {number} of {segment.name} does not match its checksum")
    return piece


def read_array(folder: Path, name: str, dtype: np.dtype[Any], count: int, sha: str) -> NDArray[Any]:
    """A file of ``count`` values.

    Raises:
        ReplayCheckpointError: it is missing, of another size, or does not match its checksum.
    """
    size = count * dtype.itemsize
    found = read_file(folder, name, most=size)
    if len(found) != size:
        raise damaged(folder, f"{name} has {len(found)} bytes where {size} were written")
    if digest(found) != sha:
        raise damaged(folder, f"{name} does not match its checksum")
    return found.view(dtype)


def read_file(folder: Path, name: str, *, most: int) -> NDArray[np.uint8]:
    """Content of a regular file of at most so many bytes.

    Raises:
        ReplayCheckpointError: there is none, or it is larger.
    """
    descriptor, size = _open(folder, name)
    try:
        if size > most:
            raise damaged(folder, f"{name} has {size} bytes, more than {most}")
        content = np.empty(size, np.uint8)
        _read_all(folder, name, descriptor, content, 0)
    finally:
        os.close(descriptor)
    return content


def write_file(path: Path, content: NDArray[Any]) -> None:
    """Write and flush a new file. Raises OSError where it cannot be written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: NDArray[Any]) -> None:
    """Append an array to a file. Raises OSError where it cannot be written."""
    rest = _bytes(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def digest(content: NDArray[Any] | bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(content if isinstance(content, bytes) else _bytes(content)).hexdigest()


def damaged(folder: Path, reason: str) -> ReplayCheckpointError:
    """The error that says so."""
    return ReplayCheckpointError(f"replay checkpoint {folder} is damaged: {reason}")


def _open(folder: Path, name: str) -> tuple[int, int]:
    """Descriptor and size of a regular file; not of a link or a pipe, which may lead or wait elsewhere."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise damaged(folder, f"{name} cannot be opened ({error.strerror})") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise damaged(folder, f"{name} is not a regular file")
    return descriptor, found.st_size


def _read_all(folder: Path, name: str, descriptor: int, content: NDArray[Any], at: int) -> None:
    rest = _bytes(content)
    try:
        while rest:
            done = os.preadv(descriptor, [rest], at)
            if not done:
                raise OSError(0, "it has become shorter")
            rest, at = rest[done:], at + done
    except OSError as error:
        raise damaged(folder, f"{name} cannot be read ({error.strerror})") from error


def _bytes(content: NDArray[Any]) -> memoryview:
    """Of a contiguous array."""
    return content.view(np.uint8).data
