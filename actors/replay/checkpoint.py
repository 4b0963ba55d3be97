"""Checkpoints of a replay store: incremental, of one instant while others write, atomic.

docs/explanation/replay.md says what is promised. A checkpoint is a folder that has everything (``checkpoint_files``); blocks
that an earlier one of the same store has already are hard links to its files, so they are written once, and freed with the
last checkpoint that has them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.replay import kernel
from actors.replay.checkpoint_files import (
    COUNTERS,
    ENTRY,
    MOST_SEGMENTS,
    PASSES,
    PIECE_BYTES,
    STATUS,
    BlockSegment,
    Manifest,
    RowSizes,
    SegmentWriter,
    damaged,
    digest,
    open_segment,
    read_array,
    read_piece,
    write_file,
)
from actors.replay.errors import ReplayCheckpointError
from actors.replay.kernel import HeaderStruct
from actors.replay.limiter import state_of
from actors.replay.rows import Frozen, Keys
from actors.replay.schema import ReplaySchema
from actors.replay.store import MAX_TIMESTAMP, ReplayStore
from actors.replay.tree import Integers
from collectives.closing import ClosesOnExit
from collectives.files import sync_path
from placement.errors import counted
from placement.unfinished import unfinished_beside

_QUEUE = np.dtype("<u4")
_FINISHED, _UNFINISHED = re.compile(r"\d{6,}"), re.compile(r"\.(\d{6,}|removed)\..*")


def saved_schema(folder: str | os.PathLike[str]) -> ReplaySchema:
    """Columns of a checkpoint's rows. Raises ReplayCheckpointError: it is missing or damaged."""
    return ReplaySchema.from_json(Manifest.read(Path(folder)).schema)


class Saved(NamedTuple):
    """What a checkpoint consists of.

    Attributes:
        folder: of the checkpoint
        rows: that it has
        left_out: committed rows that writers overwrote before they could be copied; it has them as deleted
        written_bytes, linked_bytes: of blocks, new, and in files of earlier checkpoints
    """

    folder: Path
    rows: int
    left_out: int
    written_bytes: int
    linked_bytes: int


class Restored(NamedTuple):
    """What was restored.

    Attributes:
        folder: of the checkpoint
        state: of the caller, as it was saved
        damaged: newer checkpoints that were skipped, with the reason
    """

    folder: Path
    state: dict[str, Any]
    damaged: tuple[str, ...] = ()


class ReplayCheckpointer(ClosesOnExit):
    """Saves and restores one store. Keep it between saves: it knows which blocks are on the disk already.

    ::

        checkpointer = ReplayCheckpointer(store)
        checkpointer.save("replay", {"seed": seed, "draw": draw})    # replay/000001, replay/000002, ...
        draw = checkpointer.restore("replay").state["draw"]
    """

    def __init__(self, store: ReplayStore) -> None:
        self._store, self._sizes = store, RowSizes.of(store.schema)
        self._segments: list[BlockSegment] = []
        self._thawed = 0

    def save(
        self, directory: str | os.PathLike[str], state: Mapping[str, Any] | None = None, *, keep: int = 2
    ) -> Saved:
        """Write the next checkpoint of a directory, and remove all but the last ``keep``.

        One process at a time saves there. Raises as ``write``.
        """
        directory = Path(directory)
        with _disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            for entry in directory.iterdir():  # of processes that were killed
                if _UNFINISHED.fullmatch(entry.name):
                    shutil.rmtree(entry)
        finished = _finished(directory)
        saved = self.write(directory / f"{int(finished[-1].name) + 1 if finished else 1:06d}", state)
        for old in _finished(directory)[: -max(1, keep)]:
            _remove(old)
        return saved

    def restore(self, directory: str | os.PathLike[str]) -> Restored:
        """Read the newest checkpoint of a directory that is not damaged.

        Raises:
            ReplayCheckpointError: there is none; or as ``read``, of the newest.
        """
        directory, reasons = Path(directory), list[str]()
        for folder in _finished(directory)[::-1]:
            try:
                return self.read(folder)._replace(damaged=tuple(reasons))
            except ReplayCheckpointError as error:
                reasons.append(str(error))
        raise ReplayCheckpointError(reasons[0] if reasons else f"{directory} has no replay checkpoint")

    def write(self, folder: str | os.PathLike[str], state: Mapping[str, Any] | None = None) -> Saved:
        """Write a checkpoint into a new folder. It appears when it is complete, or not at all.

        ``state`` is the caller's, of values of JSON: seeds, counters of draws.

        Raises:
            ReplayCheckpointError: it cannot be written, or the state is no JSON. Earlier checkpoints stay.
            ReplayBusyError: another process is suspended with the store's lock.
        """
        folder = Path(folder)
        with _disk_errors(folder), ExitStack() as undo:
            with _appearing(folder) as beside:
                frozen = self._store.freeze()
                if frozen.header.thawed != self._thawed:  # another process has restored something else
                    self._hold([])
                linked = self._link(beside, frozen)
                number = 1 + max((segment.number for segment in self._segments), default=0)
                writer = SegmentWriter(beside, number)
                undo.callback(writer.discard)
                frozen, left_out = self._copy(writer, linked, frozen)
                segments = [*linked, *writer.finish()]
                self._write_status(beside, frozen, left_out, segments, state or {})
            undo.pop_all()
        self._hold(segments, frozen.header.thawed)
        rows = int(np.count_nonzero(_committed(frozen.rows))) - len(left_out)
        written = writer.num_bytes
        return Saved(folder, rows, len(left_out), written, sum(map(self._num_bytes, segments)) - written)

    def read(self, folder: str | os.PathLike[str], *, as_table: bool = False) -> Restored:
        """Replace the content of the store by a checkpoint. No other process may use the store meanwhile.

        ``as_table``: whichever shard was saved, its rows are those of this store, a table of one shard; and where the saved
        store had a removal function, this one may have any removal.

        The rate limiter goes on as ``Limiter.resume`` says. Keys from before mean nothing afterwards. If a block turns
        out to be damaged, the store is empty.

        Raises:
            ReplayCheckpointError: it is missing or damaged, or of a store with another schema or other rules.
            ReplayBusyError: a row is being written.
        """
        folder = Path(folder)
        manifest = Manifest.read(folder)
        self._check_fits(folder, manifest, as_table)
        status = read_array(folder, "status.bin", STATUS, manifest.capacity, manifest.status)
        queue = read_array(folder, "queue.bin", _QUEUE, manifest.free, manifest.queue)
        frozen = self._frozen(folder, manifest, status, queue)
        segments: list[BlockSegment] = []
        try:
            for found in sorted(manifest.segments, key=lambda segment: segment["number"]):
                opened = open_segment(folder, found, self._sizes, self._store.schema.max_length)
                segments.append(opened)  # those that were opened are closed below
            self._load(folder, frozen, status, segments)
            self._store.limiter.resume(manifest.limiter)
        except BaseException:
            _close(segments)
            raise
        self._hold(segments, self._store.freeze().header.thawed)
        return Restored(folder, dict(manifest.state))

    def close(self) -> None:
        """Forget what is on the disk: the next checkpoint has no links. Safe to call twice."""
        self._hold([])

    def __del__(self) -> None:
        if hasattr(self, "_segments"):
            self.close()

    # ---- saving

    def _link(self, folder: Path, frozen: Frozen) -> list[BlockSegment]:
        """Link segments that are worth it: at least half of their bytes are needed, and they are the largest."""
        known, holder = self._known(self._segments)
        needed = _committed(frozen.rows) & (known == _generations(frozen.rows))
        live = np.bincount(
            holder[needed],
            self._sizes(frozen.rows["length"][needed]),
            minlength=len(self._segments),
        )
        worth = [at for at, segment in enumerate(self._segments) if 2 * live[at] >= self._num_bytes(segment)]
        largest = sorted(worth, key=lambda at: -live[at])[: MOST_SEGMENTS - 1]
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return [self._segments[at] for at in sorted(largest) if self._segments[at].link_into(descriptor)]
        finally:
            os.close(descriptor)

    def _copy(
        self, writer: SegmentWriter, linked: Sequence[BlockSegment], frozen: Frozen
    ) -> tuple[Frozen, Integers]:
        """Write all rows that no linked segment has. Returns the store's status, and the rows that are left out.

        Rows are copied without the lock. If one was overwritten meanwhile, the status is no longer one of which all blocks
        can be had; then a later status is tried, with the few rows that were committed since.
        """
        known, _ = self._known(linked)
        for attempt in range(PASSES):
            if attempt:
                frozen = self._store.freeze()
            rows = frozen.rows
            missing = np.flatnonzero(_committed(rows) & (known != _generations(rows)))
            missing = missing[np.argsort(rows["sequence"][missing])]  # those first that are overwritten first
            copied = self._copy_rows(writer, rows, missing)
            known[copied] = _generations(rows[copied])
            if len(copied) == len(missing):
                return frozen, np.empty(0, np.int64)
        return frozen, np.flatnonzero(_committed(rows) & (known != _generations(rows)))

    def _copy_rows(self, writer: SegmentWriter, rows: NDArray[Any], missing: Integers) -> Integers:
        """Write rows, and return those that were not overwritten meanwhile."""
        lengths, copied = rows["length"][missing], [np.empty(0, np.int64)]
        buffer = self._buffer(lengths)
        for piece in self._sizes.pieces(lengths):
            indices, steps = missing[piece], lengths[piece].astype(np.int64)
            keys = Keys(indices + self._store.base, _generations(rows[indices]))
            num_bytes, good = self._store.pack(keys, steps, buffer)
            entries = np.empty(int(good.sum()), ENTRY)
            entries["generation"], entries["index"] = keys.generations[good], indices[good]
            entries["length"] = steps[good]
            writer.add(entries, buffer[:num_bytes])
            copied.append(indices[good])
        return np.concatenate(copied)

    def _write_status(
        self,
        folder: Path,
        frozen: Frozen,
        left_out: Integers,
        segments: Sequence[BlockSegment],
        state: Mapping[str, Any],
    ) -> None:
        rows, header = frozen.rows, frozen.header
        status = np.zeros(len(rows), STATUS)
        status["generation"] = _generations(rows)
        kept = _committed(rows)
        kept[left_out] = False
        for name in ("sequence", "sampled", "priority", "timestamp", "length"):
            status[name][kept] = rows[name][kept]
        # Rows that are being written return to the queue, as if their writers had died.
        writing = np.flatnonzero((rows["tag"] & np.uint64(3)) == kernel.WRITING)
        queue = np.concatenate((frozen.queue, writing, left_out)).astype(_QUEUE)
        write_file(folder / "status.bin", status)
        write_file(folder / "queue.bin", queue)
        Manifest(
            schema=self._store.schema.to_json(),
            capacity=self._store.capacity,
            shard=self._store.base // self._store.capacity,
            num_shards=self._store.num_shards,
            removal=kernel.REMOVALS[header.removal],
            max_times_sampled=header.max_sampled,
            counters={name: int(getattr(header, name)) for name in COUNTERS},
            limiter=state_of(header, self._store.endpoint),
            state=state,
            status=digest(status),
            queue=digest(queue),
            free=len(queue),
            segments=tuple(segment.to_json() for segment in segments),
        ).write(folder)

    # ---- restoring

    def _check_fits(self, folder: Path, manifest: Manifest, as_table: bool) -> None:
        """Raise unless the store would go on exactly as the saved one, or as a table with its rows."""
        store, saved = self._store, ReplaySchema.from_json(manifest.schema)
        own = self._store.freeze().header
        if saved != store.schema:
            raise _foreign(folder, _brief(saved), _brief(store.schema))
        place, removal = (manifest.shard, manifest.num_shards), manifest.removal
        if as_table:
            place = (0, 1)
            removal = kernel.REMOVALS[own.removal] if removal == "user" else removal
        rules = (kernel.REMOVALS[own.removal], own.max_sampled)
        for name, theirs, ours in (
            ("shards", place, (store.base // store.capacity, store.num_shards)),
            ("removal and max_times_sampled", (removal, manifest.max_times_sampled), rules),
        ):
            if theirs != ours:
                raise _foreign(folder, f"{name} {theirs}", f"{name} {ours}")
        if manifest.capacity > store.capacity or (
            store.num_shards > 1 and manifest.capacity != store.capacity
        ):
            wanted = (
                "of shards, the same is needed" if store.num_shards > 1 else "at least as many are needed"
            )
            raise _foreign(folder, counted(manifest.capacity, "row"), f"{store.capacity}; {wanted}")

    def _frozen(self, folder: Path, manifest: Manifest, status: NDArray[Any], queue: NDArray[Any]) -> Frozen:
        """The status table and queue for the store, whose capacity may be larger."""
        _check_status(folder, manifest, status, queue, self._store.schema.max_length)
        capacity, here = self._store.capacity, len(status)
        rows = np.zeros(capacity, kernel.ROW)
        for name in ("sequence", "sampled", "priority", "timestamp", "length"):
            rows[name][:here] = status[name]
        state = np.where(status["length"] > 0, kernel.COMMITTED, kernel.FREE).astype(np.uint64)
        rows["tag"][:here] = status["generation"] << np.uint64(2) | state
        rows["slot"] = self._slots(rows)
        header = HeaderStruct(**{name: manifest.counters[name] for name in COUNTERS})
        # Indices beyond the saved capacity have never been used: they come last.
        return Frozen(header, rows, np.concatenate((queue, np.arange(here, capacity))).astype(np.int32))

    def _slots(self, rows: NDArray[Any]) -> NDArray[np.int32]:
        """Slot of each index: its own; with a memory budget, the newest rows are in memory, oldest first."""
        if not self._store.spills:
            return np.arange(len(rows), dtype=np.int32)
        slots = np.full(len(rows), -1, np.int32)
        live = np.flatnonzero(_committed(rows))
        newest = live[np.argsort(rows["sequence"][live])][-self._store.slots :]
        slots[newest] = np.arange(len(newest))
        return slots

    def _load(
        self, folder: Path, frozen: Frozen, status: NDArray[Any], segments: Sequence[BlockSegment]
    ) -> None:
        """Fill the store. It is empty until all blocks are in their places."""
        for segment in segments:
            if segment.entries["index"].max() >= len(status):
                raise damaged(folder, f"{segment.name} has a row of an index that does not exist")
        known, holder = self._known(segments)
        live = _committed(frozen.rows)
        if (known != _generations(frozen.rows))[live].any():
            raise damaged(folder, "a row of its status has no blocks")
        empty = np.zeros_like(frozen.rows)
        empty["tag"] = self._store.snapshot()["tag"] >> np.uint64(2) << np.uint64(2)
        empty["slot"] = frozen.rows["slot"] if not self._store.spills else -1
        everything = np.arange(len(empty), dtype=np.int32)
        self._store.thaw(Frozen(HeaderStruct(random=1), empty, everything))
        for position, segment in enumerate(segments):
            self._load_segment(folder, segment, frozen.rows, live & (holder == position))
        self._store.thaw(frozen)

    def _load_segment(
        self, folder: Path, segment: BlockSegment, rows: NDArray[Any], wanted: NDArray[np.bool_]
    ) -> None:
        indices, lengths = segment.entries["index"].astype(np.int64), segment.entries["length"]
        # The generation again: an index may occur in a segment twice, once for each row that it had.
        needed = wanted[indices] & (segment.entries["generation"] == _generations(rows[indices]))
        if (rows["length"][indices[needed]] != lengths[needed]).any():
            raise damaged(folder, f"{segment.name} and the status differ in the length of a row")
        sizes, begin, at = self._sizes(lengths), 0, 0
        buffer = self._buffer(lengths)
        for number, (count, _) in enumerate(segment.pieces):
            part = slice(begin, begin + count)
            size = int(sizes[part].sum())
            if size > len(buffer):
                raise damaged(folder, f"piece {number} of {segment.name} is too large")
            packed = read_piece(folder, segment, number, at, size, buffer)
            chosen = needed[part]
            offsets = (np.cumsum(sizes[part]) - sizes[part])[chosen]
            local = indices[part][chosen]
            self._store.unpack(
                local + self._store.base,
                np.ascontiguousarray(lengths[part][chosen], np.int64),
                rows["slot"][local],
                offsets,
                packed,
            )
            begin, at = begin + count, at + size

    # ---- segments

    def _known(self, segments: Sequence[BlockSegment]) -> tuple[NDArray[np.uint64], Integers]:
        """Generation of the newest row of each index in these segments, 0 if there is none; and which segment has it."""
        known = np.zeros(self._store.capacity, np.uint64)
        holder = np.zeros(self._store.capacity, np.int64)
        for position, segment in enumerate(
            segments
        ):  # an index' later row is in a later segment, or later in it
            known[segment.entries["index"]] = segment.entries["generation"]
            holder[segment.entries["index"]] = position
        return known, holder

    def _num_bytes(self, segment: BlockSegment) -> int:
        return int(self._sizes(segment.entries["length"]).sum())

    def _buffer(self, lengths: NDArray[Any]) -> NDArray[np.uint8]:
        """For a piece of rows of these lengths."""
        largest = int(self._sizes(lengths).max(initial=0))
        return np.empty(max(PIECE_BYTES, largest), np.uint8)

    def _hold(self, segments: list[BlockSegment], thawed: int = 0) -> None:
        """Keep what the next checkpoint may link, while the store is not restored again."""
        _close([segment for segment in self._segments if segment not in segments])
        self._segments, self._thawed = segments, thawed


def _committed(rows: NDArray[Any]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (rows["tag"] & np.uint64(3)) == kernel.COMMITTED
    return found


def _generations(rows: NDArray[Any]) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = rows["tag"] >> np.uint64(2)
    return found


def _check_status(
    folder: Path, manifest: Manifest, status: NDArray[Any], queue: NDArray[Any], max_length: int
) -> None:
    """Raise unless this is the status of a store."""
    live = status[status["length"] > 0]
    free = np.sort(np.concatenate((queue, np.flatnonzero(status["length"] > 0))))
    good = (
        np.array_equal(free, np.arange(len(status)))
        and (status["generation"] < 2**61).all()
        and (live["generation"] > 0).all()
        and (live["length"] <= max_length).all()
        and ((live["priority"] >= 0) & (live["priority"] < np.inf)).all()
        and ((live["timestamp"] >= 0) & (live["timestamp"] < MAX_TIMESTAMP)).all()
        and len(np.unique(live["sequence"])) == len(live)
        and int(live["sequence"].max(initial=0)) <= manifest.counters["sequence"] < 2**62
        and int(live["sampled"].max(initial=0)) < 2**62
        and manifest.counters["random"] > 0
        and max(manifest.counters[name] for name in COUNTERS if name != "random") < 2**62
    )
    if not good:
        raise damaged(folder, "its status is none that a store can have")


def _foreign(folder: Path, theirs: str, ours: str) -> ReplayCheckpointError:
    return ReplayCheckpointError(
        f"replay checkpoint {folder} is of a store with {theirs} where this one has {ours}"
    )


def _brief(schema: ReplaySchema) -> str:
    columns = ", ".join(
        f"{column}+{column.extra}" if column.extra else str(column) for column in schema.columns
    )
    return f"{columns} and max_length {schema.max_length}"


# ---- folders


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which appears under its name if the block succeeds, and vanishes else."""
    if os.path.lexists(folder):
        raise ReplayCheckpointError(f"{folder} exists already: a checkpoint is written into a new folder")
    beside = unfinished_beside(folder)
    beside.mkdir(mode=0o700)
    try:
        yield beside
        sync_path(beside)
        beside.chmod(0o755)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    try:
        sync_path(folder.parent)
    except OSError:  # it may not survive a power cut
        _remove(folder)
        raise


def _finished(directory: Path) -> list[Path]:
    """Checkpoints of a directory, oldest first."""
    with suppress(OSError):
        return sorted(
            (entry for entry in directory.iterdir() if _FINISHED.fullmatch(entry.name)),
            key=lambda entry: int(entry.name),
        )
    return []


def _remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, so that half of one is never taken for a whole."""
    with suppress(OSError):
        aside = Path(tempfile.mkdtemp(prefix=".removed.", dir=folder.parent))
        folder.rename(aside / folder.name)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReplayCheckpointError(
            f"replay checkpoint {folder} cannot be written ({error.strerror}): earlier ones stay; free space there, or "
            "choose another folder"
        ) from error


def _close(segments: Sequence[BlockSegment]) -> None:
    for segment in segments:
        os.close(segment.descriptor)
