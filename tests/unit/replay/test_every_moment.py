"""A process that is killed at any machine instruction of a request: every state of the memory that it can leave is tried."""

import ctypes
import mmap
import os
import signal
from functools import partial

import numpy as np
import pytest
from replay_processes import forked, stepped
from replay_tables import LENGTH, SCHEMA, content, spilling

from actors.replay import (
    Gatherer,
    Keys,
    Prioritized,
    ReplayStore,
    Subscription,
    SubSequences,
    Uniform,
    gather,
)
from actors.replay.kernel import (
    COMMITTED,
    DELETED,
    FREE,
    PRIORITIES,
    ROWS,
    STALE,
    VALID,
    WINDOWS,
    WRITING,
    address,
    with_arrays,
)
from actors.replay.selection import Selection
from actors.replay.store import _LOCK_AT

SELECTORS = (Uniform(), Prioritized(0.5), SubSequences(2))
WHOLE = [Subscription(column=name, length=LENGTH) for name in ("obs", "action", "done")]


class Memory:
    """All that processes share of a store, but for the lock."""

    def __init__(self, store):
        self._views = [np.frombuffer(store._control, np.uint8), np.frombuffer(store._data, np.uint8)]
        self._file = store._descriptors[2] if store.spills else None

    def copy(self):
        size = 0 if self._file is None else os.fstat(self._file).st_size
        file = b"" if self._file is None else os.pread(self._file, size, 0)
        return (*(view.tobytes() for view in self._views), file)

    def write(self, copied):
        lock = slice(_LOCK_AT, _LOCK_AT + 64)
        kept = self._views[0][lock].copy()
        for view, values in zip(self._views, copied, strict=False):
            view[:] = np.frombuffer(values, np.uint8)
        self._views[0][lock] = kept
        if self._file is not None:
            os.pwrite(self._file, copied[2], 0)


def states_of(store, act):
    """The memory after each instruction of a child that does ``act``, if it differs from the one before."""
    memory, states = Memory(store), []
    last = memory.copy()

    def look():
        nonlocal last
        if (now := memory.copy()) != last:
            states.append(now)
            last = now
        return False

    assert not stepped(act, look)
    return states


def locked(store, act):
    """Do ``act`` while the lock is taken."""
    libc, mutex = ctypes.CDLL(None), ctypes.c_void_p(store._native.header + _LOCK_AT)
    assert libc.pthread_mutex_lock(mutex) == 0
    act()
    assert libc.pthread_mutex_unlock(mutex) == 0


def die_with_the_lock(store):
    child, read = forked(lambda _: locked(store, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    os.waitpid(child, 0)
    os.close(read)


def chain(store, first, count):
    """Rows of a list, checked in both directions."""
    at, before, found = getattr(store._header, first), -1, []
    while at >= 0:
        assert store._rows["prev"][at] == before
        found.append(int(at))
        assert len(found) <= count
        at, before = store._rows["next"][at], at
    assert len(found) == count
    return found


def check(store, numbers):
    """All that the lock guards fits the tags, and each committed row has the content of its number."""
    store.reclaim()
    status, header = store.status(), store._header
    by_state = {state: np.flatnonzero(status["state"] == state).tolist() for state in range(4)}
    assert not by_state[WRITING]
    order = chain(store, "oldest", header.count)
    assert sorted(order) == by_state[COMMITTED]
    assert (np.diff(status["sequence"][order]) > 0).all()
    assert sorted(chain(store, "first_free", header.free)) == sorted(by_state[FREE] + by_state[DELETED])
    assert (header.oldest, header.newest) == ((order[0], order[-1]) if order else (-1, -1))
    live = status["state"] == COMMITTED
    for tree, spec in enumerate(store.specs):
        weights = {ROWS: 1.0, WINDOWS: status["length"] - 1.0, PRIORITIES: np.sqrt(status["priority"])}
        if spec.kind in weights:  # not that of removal
            leaves = np.where(live, weights[spec.kind], 0.0)
            np.testing.assert_array_equal(store.leaves(tree)[1], leaves)
            assert store.total(tree) == pytest.approx(leaves.sum(), rel=1e-12)
    slots = store.snapshot()["slot"]
    assert len(set(slots[slots >= 0].tolist())) == (slots >= 0).sum() <= store.slots
    assert header.in_file == (slots[live] < 0).sum()
    if store.max_times_sampled:
        assert (status["sampled"][live] < store.max_times_sampled).all()
    keys = {(row, int(status["generation"][row])) for row in by_state[COMMITTED]}
    assert current(store, sorted(keys), numbers) == keys
    return keys


def current(store, keys, numbers):
    """Which of these rows a reader without the lock gets. Each has the content of its number."""
    n = len(keys)
    arrays = Keys(np.array([row for row, _ in keys]), np.array([found for _, found in keys], np.uint64))
    batch = gather(store, Selection(arrays, np.zeros(n, np.int64), np.ones(n), np.ones(n)), WHOLE)
    expected = content([numbers[key] for key in keys])
    for name, values in expected.items():
        mask = batch.masks[name] & batch.current[:, None]
        np.testing.assert_array_equal(batch.values[name][mask], values[:, :LENGTH][mask])
    return {key for key, good in zip(keys, batch.current, strict=True) if good}


def full(folder, **rules):
    """Six rows, two of them spilled if there is a folder; and the number of each by key."""
    store = (
        spilling(folder, 6, 2, SELECTORS, **rules)
        if folder
        else ReplayStore.create(SCHEMA, 6, selectors=SELECTORS, **rules)
    )
    for number in range(6):
        store.insert(content([number]), [2 + number], [number**2.0], [100 - number])
    return store, {(number, 1): number for number in range(6)}


def prepared(store, name, *arguments):
    """A call of the kernel with no Python before it: there are few instructions to try."""
    function, kept = getattr(store._library, f"replay_{name}"), arguments
    plain = [address(found) if isinstance(found, np.ndarray) else found for found in kept]
    return lambda: function(store.native, *plain) if kept else None


def insert(*given):
    """Rows of these numbers, whose length is the longest."""
    *numbers, store = given
    n, rows = len(numbers), content(numbers)
    arrays = [np.ascontiguousarray(rows[column.name]) for column in SCHEMA.columns]
    sources = np.array([address(array) for array in arrays])
    kept = store._statistics(n, LENGTH, np.full(n, LENGTH), 9.0, 50)
    keys = np.empty((2, n), np.int64)
    act = prepared(store, "insert", n, LENGTH, sources, *kept.arrays, 7, *keys)
    return lambda: act() if arrays else None


def of_rows(name, *rows, marked=False, more=()):
    """A request about these rows, with arrays of these types after their keys."""

    def request(store):
        keys = Keys(np.array(rows), np.ones(len(rows), np.uint64))
        if marked:
            assert store.mark(keys).all()
        return prepared(store, name, len(rows), *keys, *(np.full(len(rows), 9, dtype) for dtype in more))

    return request


def read(*rows):
    """So often that spilled ones return to memory."""

    def request(store):
        n = 8 * len(rows)
        indices, generations, steps = np.resize(rows, n), np.ones(n, np.uint64), np.zeros(n, np.int64)
        act, arrays = with_arrays("gather"), (indices, generations, steps, np.empty(n, np.uint8), None)
        return lambda: act(store.native, 0, n, 0, None, arrays)

    return request


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize(
    ("rules", "request_of", "keeps"),  # rows that the request leaves alone
    [
        pytest.param({"removal": "fifo"}, partial(insert, 7), {1, 2, 3, 4, 5}, id="insert, fifo"),
        pytest.param({"removal": "oldest"}, partial(insert, 7, 7), {0, 1, 2, 3}, id="insert, oldest"),
        pytest.param({"removal": "random"}, partial(insert, 7), set(), id="insert, random"),
        pytest.param({}, of_rows("delete", 1, 4), {0, 2, 3, 5}, id="delete"),
        pytest.param({"max_times_sampled": 1}, of_rows("mark", 0, 3, 5, more=[bool]), {1, 2, 4}, id="mark"),
        pytest.param(
            {"max_times_sampled": 1}, of_rows("unmark", 0, 3, 5, marked=True), {1, 2, 4}, id="unmark"
        ),
        pytest.param({}, of_rows("update", 2, 3, more=[float]), set(range(6)), id="update"),
        pytest.param({}, read(0, 1), set(range(6)), id="read"),
    ],
)
def test_what_a_killed_process_leaves_is_whole(tmp_path, rules, request_of, keeps, spills):
    """Also what another reads beside it, before it is killed."""
    store, numbers = full(tmp_path if spills else None, **rules)
    act, memory = request_of(store), Memory(store)
    # Rows that it may insert.
    numbers |= {(index, generation): 7 for index in range(6) for generation in (2, 3)}
    kept = {(row, 1) for row in keeps}

    def read_beside():
        assert kept <= current(store, sorted(numbers), numbers)

    for state in states_of(store, act):
        memory.write(state)
        if store._header.version & 1:
            locked(store, read_beside)
            die_with_the_lock(store)
        else:
            read_beside()
        assert kept <= check(store, numbers)


def test_a_row_that_is_overwritten_between_its_copy_and_the_second_look_is_stale():
    """The reader stops after its first copied byte. What it has copied then, and what it copies later, are of two rows."""
    store = ReplayStore.create(SCHEMA, 1)
    keys = store.insert(content([5]))
    shared = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    values, valid = shared[64 : 64 + 12 * LENGTH].view(np.float32).reshape(1, LENGTH, 3), shared[:1]
    gatherer = Gatherer(store, WHOLE[:1], 1, out={"obs": values})
    act, arrays = with_arrays("gather"), (*keys, np.zeros(1, np.int64), valid, None)
    seen = []

    def overwrite():
        if not seen and values.any():
            seen.append(int(valid[0]))
            store.insert(content([7]))
        return False

    assert not stepped(lambda: act(store.native, 0, 1, *gatherer._part_arguments, arrays), overwrite)
    assert seen == [VALID]
    assert valid[0] == STALE
