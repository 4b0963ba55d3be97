"""A replay store: trajectories in column blocks of shared memory, written in place by several processes.

docs/explanation/replay.md has the layout, the order of writes and the alternatives. Atomics and lock are in kernel.c.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from actors.replay import kernel, memory
from actors.replay.candidates import Candidates, Numbers, Order
from actors.replay.errors import RateLimitedError, ReplayBusyError, ReplayDamagedError, ReplayError
from actors.replay.kernel import (
    ColumnStruct,
    HeaderStruct,
    StoreStruct,
    TreeStruct,
    address,
)
from actors.replay.layout import (
    META_AT,
    check_sizes,
    file_sizes,
    lay_out_tree,
    layout_of,
    slots_in_memory,
    tree_specs,
)
from actors.replay.limiter import Limiter, RateLimit, Waits
from actors.replay.metrics import EXAMINED_ROWS, ReplayMetrics, histogram_of
from actors.replay.rows import (
    Drawn,
    Frozen,
    Keys,
    Statistics,
    StepForms,
    TreeSpec,
    brief,
    checked,
    default_statistics,
    in_order,
    non_negative,
    status_of,
    whole,
)
from actors.replay.schema import ReplaySchema
from actors.replay.tree import Edges, Floats, Integers, total
from collectives.closing import ClosesOnExit
from placement.errors import counted

MAGIC = 0x3330594C50455241
"""AREPLY03 in ASCII: the last two digits count versions of the layout."""
LOCK_LIMIT_S = 10.0
"""Longest wait for another process that holds the lock. It holds it for microseconds, or it is suspended."""
MAX_TIMESTAMP = 0x3FF0 << 48
"""Exclusive. In nanoseconds since 1970, the year 2116."""
_MOST_FORMS = 64
"""Sets of shapes that are known to fit."""
_INCARNATION_BITS = 40
"""Generations of an index in one incarnation: 2**40."""
_LOCK_AT, _META_BYTES_AT = kernel.LOCK_AT, 3584
Removal = str | Callable[[NDArray[Any]], ArrayLike]


class ReservedRow:
    """A row that this process fills in place. Leaving the ``with`` block without ``commit`` gives it back."""

    def __init__(self, store: ReplayStore, index: int) -> None:
        """See ``ReplayStore.allocate``."""
        self._store, self._index, self._open = store, index, True

    def __getitem__(self, column: str) -> NDArray[Any]:
        """The block of a column, (max_length + extra, *shape). Bytes beyond the committed length are not read."""
        return self._store.block(column, self._index)

    def commit(self, length: int | None = None, priority: float = 1.0, timestamp: int | None = None) -> Keys:
        """Make the row selectable.

        Args:
            length: timesteps that were filled; None: the maximum
            priority: not negative
            timestamp: any order of the caller's, at least 0; None: nanoseconds since 1970

        Raises:
            ReplayError: a value is outside its range, or the row is no longer this process's.
        """
        keys = self._store.commit(self._index, length, priority, timestamp)
        self._open = False
        return keys

    def cancel(self) -> None:
        """Give the row back. Safe to call twice, and after ``commit``."""
        if self._open:
            self._store.cancel(self._index)  # if it raises, the row is still this process's
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()


class ReplayStore(ClosesOnExit):
    """One shard of a table of trajectories. Any number of processes of the host may write, select and read.

    ::

        store = ReplayStore.create(schema, capacity=1000, selectors=(Prioritized(0.6),))   # in the first process
        store = ReplayStore.attach(endpoint)                                               # in the others
        keys = store.insert({"obs": obs, "action": action}, priorities=td_errors)
        with store.allocate() as row:
            row["obs"][:length] = ...
            row.commit(length)

    Attributes:
        schema: columns and maximum length
        capacity: rows of this shard
        base: global index of the first
        num_shards: shards of the table, all of this capacity
        slots: rows that are in memory at a time
        spills: whether there may be more, in the file of spilled rows
    """

    def __init__(self, meta: Mapping[str, Any], descriptors: Sequence[int], removal: Removal) -> None:
        """See ``create`` and ``attach``."""
        self._library = kernel.library()
        self._descriptors, self._meta = tuple(descriptors), meta
        self.schema = ReplaySchema.from_json(meta["schema"])
        self.capacity, self.num_shards = int(meta["capacity"]), int(meta["num_shards"])
        self.base = self.capacity * int(meta["shard"])
        self.slots, self.spills = int(meta["slots"]), bool(meta["spills"])
        self.specs = tuple(TreeSpec(*spec) for spec in meta["trees"])
        self._removal = removal
        self._control = memory.map_shared(self._descriptors[0], populate=True)
        self._data = memory.map_shared(self._descriptors[1], populate=not meta["on_disk"])
        self._native, self._kept = self._structs()
        self.native = ctypes.addressof(self._native)
        """Address of kernel.c's Store."""
        self._header = HeaderStruct.from_buffer(self._control)
        self._views = self._columns()
        self._rows = np.frombuffer(self._control, kernel.ROW, self.capacity, layout_of(meta)["rows"])
        self._dtypes = {column.name: column.dtype for column in self.schema.columns}
        self._step_forms = StepForms.of(self.schema)
        self._insert_arrays, self._draw_arrays, self._gather_arrays = map(
            kernel.with_arrays, ("insert", "draw", "gather")
        )
        self._in_order = in_order([column.name for column in self.schema.columns])
        self._forms: dict[tuple[tuple[int, ...], ...], tuple[int, int]] = {}
        self._closed = False

    @classmethod
    def create(
        cls,
        schema: ReplaySchema,
        capacity: int,
        *,
        selectors: Sequence[Any] = (),
        removal: Removal = "fifo",
        max_times_sampled: int = 0,
        memory_bytes: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        shard: int = 0,
        num_shards: int = 1,
        incarnation: int = 0,
        seed: int = 0,
        limit: RateLimit | None = None,
    ) -> Self:
        """Create a store, or one shard of a table.

        Args:
            schema: columns and maximum length
            capacity: rows (trajectories) of this shard
            selectors: those that will be used; each may need a tree of sums. Uniform selection is always possible
            removal: which row is overwritten when the store is full: fifo, lifo, oldest (timestamp), lowest_priority,
                random, or a function of the status table that returns one index or several
            max_times_sampled: a row is deleted when it has been selected so often; 0: never
            memory_bytes: budget of the store's memory, status included. Rows beyond it are spilled to ``folder``
            folder: for rows that do not fit into memory_bytes; without memory_bytes, for all rows (memory-mapped)
            shard, num_shards: place of this shard in the table
            incarnation: how often this shard was lost before: no key of a lost row fits a row of this one
            seed: of random removal
            limit: on rows drawn per row inserted; ``limiter.set`` changes it. None: none

        Raises:
            ReplayError: an argument is outside its range, the store does not fit, or there is no C compiler.
        """
        check_sizes(capacity, max_times_sampled, shard, num_shards, incarnation)
        name = _name_of(removal)
        if not kernel.library().replay_identity():
            raise ReplayError("replay stores need /proc, to see which writers are alive")
        meta: dict[str, Any] = {
            "schema": schema.to_json(),
            "capacity": capacity,
            "shard": shard,
            "num_shards": num_shards,
            "incarnation": incarnation,
            "removal": name,
            "max_times_sampled": max_times_sampled,
            "trees": tree_specs(selectors, name),
            "spills": False,
            "on_disk": folder is not None and memory_bytes is None,
        }
        meta["slots"] = slots_in_memory(meta, schema, memory_bytes, folder)
        meta["spills"] = meta["slots"] < capacity
        where = None if folder is None else Path(folder)
        status, blocks, *spilled = file_sizes(meta, schema)
        descriptors = [memory.create(status, None)]
        try:
            descriptors.append(memory.create(blocks, where if meta["on_disk"] else None))
            descriptors += [memory.create(size, where) for size in spilled]
            store = cls(meta, descriptors, removal)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        store._initialise(seed)
        if limit is not None:
            store.limiter.set(limit)
        return store

    @classmethod
    def attach(cls, endpoint: str, *, removal: Callable[[NDArray[Any]], ArrayLike] | None = None) -> Self:
        """Open a store of another process of this host, for writing and reading.

        Args:
            endpoint: ``endpoint`` of a process that has it open
            removal: the function, if the store was created with one

        Raises:
            ReplayError: it no longer exists, is of another version, or is damaged.
        """
        descriptors: list[int] = []
        try:
            for found in endpoint.split("|"):
                descriptors.append(memory.open_endpoint(found))  # noqa: PERF401 - those that were opened are closed below
            meta = _described(descriptors)
            if meta is None:
                raise ReplayError(f"{endpoint} is not a replay store of this version of rayagi")
            if (meta["removal"] == "user") != (removal is not None):
                raise ReplayError(
                    f"the store's removal is {meta['removal']}: give its function, if it is one, and only then"
                )
            return cls(meta, descriptors, removal or meta["removal"])
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    @property
    def endpoint(self) -> str:
        """What other processes attach to, while this process has the store open."""
        self.check_open()
        return "|".join(map(memory.endpoint, self._descriptors))

    @property
    def meta(self) -> Mapping[str, Any]:
        """The table and this shard of it, as values of JSON."""
        return self._meta

    @property
    def is_closed(self) -> bool:
        """Whether this process has closed it."""
        return self._closed

    @property
    def limiter(self) -> Limiter:
        """The rate limiter: its settings, its state, and who waits for it."""
        self.check_open()
        return Limiter(self, self._header)

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate limiter."""
        return bool(self._header.limit)

    def wait_to_sample(self, rows: int, keep_waiting: Callable[[], bool]) -> None:
        """Wait until the rate limiter admits sampling, as ``select`` does first.

        Args:
            rows: that will be drawn; shown as what is waited for
            keep_waiting: called several times a second; False ends the wait with an error

        Raises:
            ReplayTimeoutError: the limit's timeout_s has passed.
            RateLimitedError: ``keep_waiting`` has returned False.
            ReplayError: the store was closed.
        """
        with Waits(self.limiter, kernel.SAMPLE, rows) as waits:
            while not waits.is_admitted():
                self.check_open()
                if not keep_waiting():
                    raise RateLimitedError("sampling was given up while it waited for the rate limiter")

    def __len__(self) -> int:
        """Rows that can be selected."""
        return int(self._header.count)

    # ---- writing

    def allocate(self) -> ReservedRow:
        """Reserve a row, whose blocks this process fills in place. If the store is full, a row is removed.

        Raises:
            ReplayBusyError: all rows are being written by living processes.
            ReplayTimeoutError: the rate limiter did not admit it within its timeout.
        """
        indices = np.empty(1, np.int64)
        self._allocating(lambda: self._library.replay_allocate(self.native, 1, address(indices)), 1)
        return ReservedRow(self, int(indices[0]))

    def insert(
        self,
        rows: Mapping[str, Any],
        lengths: ArrayLike | None = None,
        priorities: ArrayLike | None = None,
        timestamps: ArrayLike | None = None,
        *,
        keep_waiting: Callable[[], bool] = lambda: True,
    ) -> Keys:
        """Copy n trajectories into the store and make them selectable together.

        Args:
            rows: by column (n, steps + extra, *shape); (n, *shape) if max_length is 1 and the column has no extra steps
            lengths: (n,) timesteps of each; None: all ``steps``
            priorities: (n,) or one, not negative; None: 1
            timestamps: (n,) or one, at least 0; None: nanoseconds since 1970
            keep_waiting: called several times a second during a wait for the rate limiter; False gives up

        Raises:
            ReplayError: a column is missing or unknown, or has another type or shape; or a value is outside its range.
            ReplayBusyError: more rows than are free or removable.
            ReplayTimeoutError: the rate limiter did not admit it within its timeout.
            RateLimitedError: ``keep_waiting`` returned False.
        """
        if self._step_forms and (
            keys := self._insert_steps(rows, lengths, priorities, timestamps, keep_waiting)
        ):
            return keys
        arrays, (count, steps) = self._arrays(rows)
        if not count:
            return Keys(np.empty(0, np.int64), np.empty(0, np.uint64))
        pointers = (ctypes.c_void_p * len(arrays))(*map(address, arrays))
        kept = self._statistics(count, steps, lengths, priorities, timestamps)
        words = np.empty(2 * count, np.int64)
        at = address(words)
        arguments = (
            *(self.native, count, steps, ctypes.addressof(pointers), *kept.addresses, time.time_ns()),
            *(at, at + 8 * count),
        )
        self._allocating(lambda: self._library.replay_insert(*arguments), count, keep_waiting)
        return Keys(words[:count], words[count:].view(np.uint64))

    def commit(self, index: int, length: int | None, priority: float, timestamp: int | None) -> Keys:
        """See ``ReservedRow.commit``."""
        steps = self.schema.max_length if length is None else length
        kept = self._statistics(1, self.schema.max_length, [steps], priority, timestamp)
        keys = Keys(
            np.array([index]), self._rows["tag"][index - self.base : index - self.base + 1] >> np.uint64(2)
        )
        self._call(self._library.replay_commit, 1, address(keys.indices), *kept.addresses, time.time_ns())
        return keys

    def cancel(self, index: int) -> None:
        """See ``ReservedRow.cancel``."""
        indices = np.array([index])
        self._call(self._library.replay_cancel, 1, address(indices))

    def delete(self, keys: Keys) -> int:
        """Take rows out of selection; they stay readable until overwritten. Returns how many were still there."""
        indices, generations = checked(keys)
        return self._call(self._library.replay_delete, len(indices), address(indices), address(generations))

    def update_priorities(self, keys: Keys, priorities: ArrayLike) -> int:
        """Set priorities. Rows that were overwritten since are left alone. Returns how many were set.

        If a row is named several times, its last priority counts.

        Raises:
            ReplayError: an index is not of this shard, or a priority is negative or not finite.
        """
        indices, generations = checked(keys)
        values = non_negative("priorities", priorities, len(indices))
        return self._call(
            self._library.replay_update, len(indices), *map(address, (indices, generations, values))
        )

    def update_steps(
        self, keys: Keys, steps: Integers, priorities: ArrayLike, exponent: float, weights: Floats
    ) -> None:
        """Set weights of timesteps, (capacity, max_length), and priorities of their rows. See ``StepPriorities.update``."""
        wanted = (self.capacity, self.schema.max_length)
        if (weights.shape, weights.dtype) != (wanted, np.float64) or not weights.flags.c_contiguous:
            raise ReplayError(
                f"weights are {weights.dtype}{list(weights.shape)}: use contiguous float64{list(wanted)}"
            )
        indices, generations = checked(keys)
        values, sums = non_negative("priorities", priorities, len(indices)), np.empty(len(indices))
        steps = np.ascontiguousarray(steps, np.int64)
        if steps.shape != indices.shape:
            raise ReplayError(f"got steps {list(steps.shape)} for {counted(len(indices), 'row')}")
        given = map(address, (indices, generations, steps, values))
        outputs = map(address, (weights, sums))
        self._call(self._library.replay_update_steps, len(indices), *given, exponent, *outputs)

    def reclaim(self) -> int:
        """Take back the rows of writers that have ended. Done by itself when rows are needed. Returns how many."""
        return self._call(self._library.replay_reap)

    # ---- reading

    def block(self, column: str, index: int) -> NDArray[Any]:
        """A column's block of a global index whose row is in memory: (max_length + extra, *shape)."""
        self.check_open()
        return self._views[self.schema.position(column)][self._rows["slot"][index - self.base]]

    def status(self) -> NDArray[Any]:
        """A consistent copy of the status table: (capacity,) of ``STATUS``."""
        return status_of(self.snapshot(), self.base)

    def snapshot(self) -> NDArray[Any]:
        """A consistent copy of kernel.c's rows."""
        rows = np.empty(self.capacity, kernel.ROW)
        self._call(self._library.replay_snapshot, address(rows))
        return rows

    def counters(self) -> dict[str, int]:
        """Rows by state, and events since creation.

        Of a table that spills: rows read, from its file or not, and those that returned to memory (promoted).
        """
        names = (
            "count",
            "writing",
            "inserted",
            "selected",
            "evicted",
            "deleted",
            "reclaimed",
            "spilled",
            "recovered",
            "promoted",
            "read",
            "read_from_file",
        )
        return {name: int(getattr(self._header, name)) for name in names}

    def metrics(self) -> ReplayMetrics:
        """Counters, histograms, bytes by tier and rate limiter, without the lock but for who waits."""
        self.check_open()
        header, times = self._header, np.empty(kernel.BINS, np.int64)
        self._call(self._library.replay_times_sampled, EXAMINED_ROWS, address(times))
        control, data = (os.fstat(descriptor).st_size for descriptor in self._descriptors[:2])
        on_disk = bool(self._meta["on_disk"])
        return ReplayMetrics(
            loads={self.base // self.capacity: header.selected},
            capacity=self.capacity,
            rows=len(self),
            inserts=header.inserted,
            samples=header.selected,
            evictions=header.evicted,
            deletions=header.deleted,
            reclaimed=header.reclaimed,
            ages=histogram_of(header.ages),
            staleness=histogram_of(header.staleness),
            times_sampled=histogram_of(times),
            memory_bytes=control if on_disk else control + data,
            mapped_bytes=data if on_disk else 0,
            spilled_rows=header.in_file,
            spilled_bytes=header.in_file * self.schema.row_bytes,
            limiter=self.limiter.status(),
        )

    def owner(self, indices: Integers) -> Integers:
        """Shard of each global index."""
        return indices // self.capacity

    # ---- for selectors

    def tree(self, spec: TreeSpec) -> int:
        """Number of the tree with these leaves. Raises ReplayError where the store was created without it."""
        if spec not in self.specs:
            raise ReplayError(
                f"this store cannot select by {spec}: name the selector in selectors= when it is created"
            )
        return self.specs.index(spec)

    def draw(self, tree: int, n: int, *numbers: int) -> Drawn:
        """Rows that hold n random targets of a tree, counted as selected.

        ``numbers``: seed, stream, round and draw of the uniform numbers. Raises ReplayError where nothing can be
        selected.
        """
        drawn = Drawn.of(n)
        accepted = self._call(self._draw_arrays, tree, *numbers, drawn)
        return drawn if accepted < n else Drawn(*drawn[:6], None)

    @property
    def max_times_sampled(self) -> int:
        """A row is deleted when it has been selected so often; 0: never."""
        return int(self._header.max_sampled)

    def draws_left(self, tree: int, most: int) -> int:
        """How often rows of a tree can be drawn before ``max_times_sampled`` removes the last, counted up to ``most``."""
        return self._call(self._library.replay_draws_left, tree, most)

    def edges(self, tree: int) -> Edges:
        """The part of a tree that other shards need for a common draw."""
        found = self._tree_structs[tree]
        children = np.zeros((found.levels, 2, kernel.FANOUT))
        self._call(self._library.replay_edges, tree, address(children))
        first = np.array(found.first[: found.levels])
        return Edges(first, first + np.array(found.nodes[: found.levels]) - 1, children)

    def total(self, tree: int) -> float:
        """Sum of all leaves of a tree, if this is the only shard."""
        return total(self.edges(tree).children[-1, 0])

    def candidates(self, order: Order, k: int, numbers: Numbers, taken: Integers) -> Candidates:
        """The k rows with the least keys, or all if they are fewer, except those at the indices ``taken``."""
        return Candidates.of(self.snapshot(), self.base, order, k, numbers, taken)

    def leaves(self, tree: int) -> tuple[NDArray[Any], Floats]:
        """Copies of kernel.c's rows and of a tree's leaves at one moment, (capacity,) each."""
        rows, leaves = np.empty(self.capacity, kernel.ROW), np.empty(self.capacity)
        self._call(self._library.replay_leaves, tree, address(rows), address(leaves))
        return rows, leaves

    def descend(self, tree: int, level: Integers, number: Integers, rest: Floats) -> Drawn:
        """Rows of this shard that hold targets within nodes of its own. Nothing is counted."""
        drawn = Drawn.of(len(rest))
        drawn.rest[:] = rest
        outputs = map(address, (level, number, drawn.rest, *drawn[:4]))
        self._call(self._library.replay_descend, tree, len(rest), *outputs)
        return drawn

    def mark(self, keys: Keys) -> NDArray[np.bool_]:
        """Count rows as selected. False where a row was not selectable any more."""
        indices, generations = checked(keys)
        accepted = np.empty(len(indices), bool)
        self._call(self._library.replay_mark, len(indices), *map(address, (indices, generations, accepted)))
        return accepted

    def unmark(self, keys: Keys) -> None:
        """Take back what ``mark`` or ``draw`` has counted, of rows that nobody gets.

        A row that was used up by it can be selected again, if its index was not allocated since.
        """
        indices, generations = checked(keys)
        self._call(self._library.replay_unmark, len(indices), *map(address, (indices, generations)))

    def gather(
        self, begin: int, end: int, parts: tuple[int, int | None], arrays: tuple[NDArray[Any] | None, ...]
    ) -> int:
        """Call kernel.c's ``replay_gather``.

        ``parts``: their number and address; ``arrays``: contiguous indices, generations, steps, valid, and where or None.
        Returns how many rows are not VALID. Threads of one process may do so at the same time.
        """
        return self._call(self._gather_arrays, begin, end, *parts, arrays)

    def examine(self, keys: Keys, steps: Integers) -> NDArray[np.uint8]:
        """STALE, VALID or OUTSIDE of ``kernel`` for each row and timestep, (n,): a gather that copies nothing.

        Raises:
            ReplayError: another number of steps than rows, or a row of another shard.
        """
        indices, generations = checked(keys)
        steps, valid = np.ascontiguousarray(steps, np.int64), np.empty(len(indices), np.uint8)
        if steps.shape != indices.shape:
            raise ReplayError(
                f"steps {list(steps.shape)} were given for {counted(len(indices), 'row')}: give one for each"
            )
        self.gather(0, len(indices), (0, None), (indices, generations, steps, valid, None))
        return valid

    def prefetch(self, keys: Keys) -> int:
        """Start reading the spilled rows of these, so that a later gather does not wait. Returns how many are spilled."""
        indices, _ = checked(keys)
        return self._call(self._library.replay_prefetch, len(indices), address(indices))

    # ---- for checkpoints

    def freeze(self) -> Frozen:
        """Everything except blocks, at one instant. The lock is held while the status table is copied."""
        header, rows = HeaderStruct(), np.empty(self.capacity, kernel.ROW)
        queue = np.empty(self.capacity, np.int32)
        rows.view(np.uint8).fill(0)  # page faults now, not with the lock
        queue.fill(0)
        free = self._call(
            self._library.replay_freeze, ctypes.addressof(header), address(rows), address(queue)
        )
        return Frozen(header, rows, queue[:free])

    def pack(self, keys: Keys, lengths: Integers, out: NDArray[np.uint8]) -> tuple[int, NDArray[np.bool_]]:
        """Copy whole rows, one after the other. Returns the bytes, and False for rows that were overwritten."""
        good = np.empty(len(lengths), bool)
        indices, generations = checked(keys)
        arrays: tuple[NDArray[Any], ...] = (indices, generations, lengths, out, good)
        arguments = map(address, arrays)
        return self._call(self._library.replay_pack, len(lengths), *arguments), good

    def unpack(
        self,
        indices: Integers,
        lengths: Integers,
        slots: NDArray[np.int32],
        offsets: Integers,
        packed: NDArray[np.uint8],
    ) -> None:
        """Put blocks of ``pack``, which begin at these offsets, where rows will have them."""
        arrays: tuple[NDArray[Any], ...] = (indices, lengths, slots, offsets, packed)
        self._call(self._library.replay_unpack, len(indices), *map(address, arrays))

    def thaw(self, frozen: Frozen) -> None:
        """Inverse of ``freeze``, for blocks that are in their places. Keys from before mean nothing afterwards.

        Raises:
            ReplayBusyError: a row is being written.
        """
        arguments = (ctypes.addressof(frozen.header), address(frozen.rows), address(frozen.queue))
        self._call(self._library.replay_thaw, *arguments)

    # ---- for devices that read this process's memory

    @property
    def slot_bytes(self) -> NDArray[np.uint8]:
        """The memory of the rows' blocks: (slots, bytes of a row). Without spilling a row's slot is its index."""
        return np.frombuffer(self._data, np.uint8, self.slots * self.schema.row_bytes).reshape(
            self.slots, self.schema.row_bytes
        )

    @property
    def status_words(self) -> NDArray[np.uint64]:
        """The memory of the status table: (capacity, 8). The first word is the tag: generation << 2 | state."""
        return self._rows.view(np.uint64).reshape(self.capacity, -1)

    @property
    def replaced(self) -> int:
        """Times that a checkpoint has replaced all rows. Generations of before may then be those of other rows."""
        return int(self._header.thawed)

    def lengths_of(self, slots: Integers) -> Integers:
        """Timesteps of the rows at these local indices, as they are now."""
        return self._rows["length"][slots].astype(np.int64)

    def close(self) -> None:
        """Close the files. Views of rows stay valid. Other processes are not affected. Safe to call twice."""
        if not self._closed:
            self._closed = True
            for descriptor in self._descriptors[:2]:
                os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self.close()
            # Not before: a call of another thread that still runs would use its number, which is another file's by then.
            for descriptor in self._descriptors[2:]:
                os.close(descriptor)
            self._library.replay_release(self.native)

    def check_open(self) -> None:
        """Raise ReplayError if the store is closed."""
        if self._closed:
            raise ReplayError("this replay store is closed")

    def __reduce__(self) -> tuple[Any, ...]:
        if callable(self._removal):
            raise ReplayError(
                "a store with a removal function cannot be pickled: attach with its endpoint and the function"
            )
        return ReplayStore.attach, (self.endpoint,)

    # ---- internals

    def _structs(self) -> tuple[StoreStruct, tuple[object, ...]]:
        layout, meta, schema = layout_of(self._meta), self._meta, self.schema
        control, data = (np.frombuffer(found, np.uint8) for found in (self._control, self._data))
        at, columns = address(control), (ColumnStruct * len(schema.columns))()
        slots = int(meta["slots"])
        for struct, column, offset in zip(columns, schema.columns, schema.offsets, strict=True):
            struct.offset, struct.extra = offset, column.extra
            struct.step_bytes, struct.row_bytes = column.step_bytes, schema.row_bytes
        self._tree_structs = trees = (TreeStruct * len(self.specs))()
        place = layout["trees"]
        for struct, spec in zip(trees, self.specs, strict=True):
            place += lay_out_tree(struct, spec, at + place, meta)
        tree = kernel.TREES_OF_REMOVALS.get(meta["removal"])
        kinds = [spec.kind for spec in self.specs]
        struct = StoreStruct(
            *(
                at,
                at + _LOCK_AT,
                at + layout["rows"],
                at + layout["slot_rows"],
                address(data),
            ),
            *(ctypes.addressof(columns), ctypes.addressof(trees)),
            *(self.capacity, self.base, slots, len(columns), len(trees)),
            -1 if tree is None else kinds.index(tree),
            self.schema.max_length,
            at + layout["warmth"],
            self._descriptors[2] if meta["spills"] else -1,
            int(LOCK_LIMIT_S * 1e9),
            int(meta["on_disk"]),
        )
        return struct, (columns, trees)

    def _columns(self) -> list[NDArray[Any]]:
        """Each column's blocks by slot: (slots, max_length + extra, *shape)."""
        structs, views = self._kept[0], []
        for struct, column in zip(structs, self.schema.columns, strict=True):  # type: ignore[call-overload]
            shape = (int(self._meta["slots"]), self.schema.max_length + column.extra, *column.shape)
            inner = np.empty(shape[1:], column.dtype).strides
            views.append(
                np.ndarray(shape, column.dtype, self._data, struct.offset, (self.schema.row_bytes, *inner))
            )
        return views

    def _initialise(self, seed: int) -> None:
        text = json.dumps(self._meta).encode()
        self._control[META_AT : META_AT + len(text)] = text
        self._control[_META_BYTES_AT : _META_BYTES_AT + 8] = len(text).to_bytes(8, "little")
        header = self._header
        header.removal = kernel.REMOVALS.index(self._meta["removal"])
        header.max_sampled, header.random = self._meta["max_times_sampled"], 2 * seed % 2**64 + 1
        self._rows["tag"] = self._meta["incarnation"] << _INCARNATION_BITS + 2
        self._check(self._library.replay_create(self.native))
        header.magic = MAGIC  # last: who attaches before that is refused

    def _insert_steps(
        self,
        rows: Mapping[str, Any],
        lengths: ArrayLike | None,
        priorities: ArrayLike | None,
        timestamps: ArrayLike | None,
        keep_waiting: Callable[[], bool],
    ) -> Keys | None:
        """``insert`` of arrays that fit as they are: a row takes half the time. With others nothing is done: None."""
        assert self._step_forms is not None
        try:
            arrays = self._in_order(rows)
            count = len(arrays[0])
        except (KeyError, TypeError):
            return None
        if not count or len(rows) != len(arrays):
            return None
        self.check_open()
        kept = self._statistics(count, 1, lengths, priorities, timestamps)
        keys = Keys(np.empty(count, np.int64), np.empty(count, np.uint64))
        insert, request = (
            self._insert_arrays,
            (self.native, arrays, self._step_forms.at, count, kept.at, *keys),
        )
        result = insert(*request)
        if result < 0:
            result = self._completed(result, lambda: insert(*request), count, keep_waiting)
        return keys if result else None

    def _arrays(self, rows: Mapping[str, Any]) -> tuple[list[NDArray[Any]], tuple[int, int]]:
        """Contiguous arrays in the order of the columns; the number of rows, and of steps."""
        if len(rows) != len(self.schema.columns):
            names = sorted(column.name for column in self.schema.columns)
            raise ReplayError(f"columns {sorted(rows)} were given where {names} are expected")
        if unknown := rows.keys() - self._dtypes.keys():
            self.schema.position(min(unknown))
        try:
            arrays = [np.asarray(rows[name]) for name in self._dtypes]
        except (ValueError, TypeError) as error:
            raise ReplayError(f"a column is no array: {error}") from error
        shapes = tuple([array.shape for array in arrays])
        if shapes not in self._forms:
            if len(self._forms) > _MOST_FORMS:
                self._forms.clear()
            self._forms[shapes] = self._form(shapes)
        for array, (name, dtype) in zip(arrays, self._dtypes.items(), strict=True):
            if array.dtype != dtype:
                raise ReplayError(f"{name} is {array.dtype}{list(array.shape)} where {dtype} is expected")
        return [array if array.flags.c_contiguous else array.copy() for array in arrays], self._forms[shapes]

    def _form(self, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
        """Number of rows and steps of arrays of these shapes."""
        count = steps = -1
        for column, shape in zip(self.schema.columns, shapes, strict=True):
            single = self.schema.max_length == 1 and not column.extra and len(shape) == len(column.shape) + 1
            found = 1 if single else shape[1] - column.extra if len(shape) > 1 else -1
            if count < 0:
                count, steps = shape[0] if shape else -1, found
            wanted = (count, *column.shape) if single else (count, steps + column.extra, *column.shape)
            if shape != wanted or not 0 < steps <= self.schema.max_length:
                raise ReplayError(
                    f"{column.name} has shape {list(shape)}; expected {counted(max(count, 0), 'row')} of 1 to "
                    f"{counted(self.schema.max_length, 'step')} (+ {column.extra}) of {column}"
                )
        return count, steps

    def _statistics(
        self, count: int, steps: int, lengths: Any, priorities: Any, timestamps: Any
    ) -> Statistics:
        """Checked lengths, priorities and timestamps of ``count`` rows."""
        if lengths is None and priorities is None and timestamps is None:
            return default_statistics(count, steps)
        sizes, weights, times = np.full(count, steps, np.int64), np.ones(count), None
        if lengths is not None:
            sizes = np.ascontiguousarray(whole("lengths", lengths))
            if sizes.shape != (count,) or not 0 < sizes.min() <= sizes.max() <= steps:
                raise ReplayError(f"lengths are {brief(lengths)}: give {count} of 1 to {steps}")
        if priorities is not None:
            weights = non_negative("priorities", priorities, count)
        if timestamps is not None:
            found = whole("timestamps", timestamps)
            if found.shape not in ((), (1,), (count,)):
                raise ReplayError(f"timestamps are {brief(timestamps)}: give one, or {count}")
            times = np.ascontiguousarray(np.broadcast_to(found, (count,)))
            if not 0 <= times.min() <= times.max() < MAX_TIMESTAMP:
                raise ReplayError(f"timestamps are {brief(timestamps)}: use 0 to {MAX_TIMESTAMP - 1}")
        return Statistics.of(sizes, weights, times)

    def _allocating(
        self, request: Callable[[], int], count: int, keep_waiting: Callable[[], bool] = lambda: True
    ) -> int:
        """Make a request that allocates rows, and again if the rate limiter or the user's removal must act first."""
        self.check_open()
        return self._completed(request(), request, count, keep_waiting)

    def _completed(
        self, result: int, request: Callable[[], int], count: int, keep_waiting: Callable[[], bool]
    ) -> int:
        """``_allocating`` after the first attempt, which had this result."""
        if result == kernel.LIMITED or result == kernel.NEED_VICTIM:
            with Waits(self.limiter, kernel.INSERT, count) as waits:
                while True:
                    if result == kernel.LIMITED:
                        if not waits.is_admitted() and not keep_waiting():
                            raise RateLimitedError(
                                "inserting was given up while it waited for the rate limiter"
                            )
                        self.check_open()
                    elif result == kernel.NEED_VICTIM:
                        self._evict_chosen()
                    else:
                        break
                    result = request()
        return self._check(result, count)

    def _evict_chosen(self) -> None:
        """Evict the rows that the user's function names."""
        status = self.status()
        assert callable(self._removal)
        chosen = np.atleast_1d(np.asarray(self._removal(status), np.int64))
        held = chosen[(chosen >= self.base) & (chosen < self.base + self.capacity)].tolist()
        generations = status["generation"]
        evicted = sum(
            self._call(self._library.replay_evict, index, int(generations[index - self.base]))
            for index in held
        )
        if not evicted:
            raise ReplayError(
                f"the removal function returned {brief(chosen)}: it must name rows in state COMMITTED"
            )

    def _call(self, function: Callable[..., int], *arguments: Any) -> int:
        self.check_open()
        return self._check(function(self.native, *arguments))

    def _check(self, result: int, count: int = 0) -> int:
        """The result, or the error that it stands for."""
        if result >= 0:
            return result
        writing, size = int(self._header.writing), self.capacity
        if result == kernel.LOCK_TIMEOUT:
            raise ReplayBusyError(
                f"another process has held the store's lock for {LOCK_LIMIT_S:g} s: it is suspended; continue or end it"
            )
        if result == kernel.ALL_WRITING:
            raise ReplayBusyError(
                f"{counted(count, 'row')} requested of {size}, with {writing} being written: commit or cancel them, "
                "or request fewer"
            )
        if result == kernel.NO_SLOT:
            raise ReplayBusyError(
                f"{counted(count, 'row')} requested, and memory_bytes has space for {self._meta['slots']}, with {writing} "
                "being written: use a larger budget, or request fewer"
            )
        if result == kernel.FOREIGN:
            raise ReplayError(
                f"an index is not of this shard, which has {self.base} to {self.base + size - 1}"
            )
        if result == kernel.DAMAGED:
            raise ReplayDamagedError(self.endpoint)
        raise ReplayError(_REASONS[result])


def _name_of(removal: Removal) -> str:
    name = removal if isinstance(removal, str) else "user"
    if name not in kernel.REMOVALS or not (callable(removal) or name != "user"):
        choices = ", ".join(kernel.REMOVALS[:-1])
        raise ReplayError(
            f"removal {removal!r} is not known: use {choices}, or a function of the status table"
        )
    return name


def _described(descriptors: Sequence[int]) -> Mapping[str, Any] | None:
    """What the first of a store's files says of it; None if it is no store's, or the files have other sizes than it says."""
    head = os.pread(descriptors[0], META_AT, 0)
    if len(head) < META_AT or int.from_bytes(head[:8], "little") != MAGIC:
        return None
    sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
    length = int.from_bytes(head[_META_BYTES_AT : _META_BYTES_AT + 8], "little")
    try:
        meta: dict[str, Any] = json.loads(os.pread(descriptors[0], min(length, sizes[0]), META_AT))
        numbers = ("capacity", "max_times_sampled", "shard", "num_shards", "incarnation")
        check_sizes(*(meta[name] for name in numbers))
        expected = file_sizes(meta, ReplaySchema.from_json(meta["schema"]))
    except (ReplayError, ValueError, TypeError, KeyError):
        return None
    return meta if sizes == expected else None


_REASONS = {
    kernel.NOT_OWNED: "only the process that allocated a row commits or cancels it, once",
    kernel.EMPTY: "nothing can be selected: the store is empty, all weights are zero, or their sum is not finite",
    kernel.IO_ERROR: "the file of spilled rows cannot be read or written: is its disk full?",
    kernel.NO_IDENTITY: "this process cannot read its entry in /proc: are its file descriptors used up?",
    kernel.NO_STEP: "a timestep is none of its row",
    kernel.TOO_LARGE: "a priority to the power of the exponent is too large",
    kernel.NO_MEMORY: "there is no memory for the bookkeeping of a request of this size",
}
