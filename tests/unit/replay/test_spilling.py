"""Rows in the file and in memory: which are where, and that readers get the right bytes whatever moves meanwhile."""

import gc
import os
import struct

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_processes import forked, kill, killed_when
from replay_tables import LENGTH, SCHEMA, content, spilling

from actors.replay import (
    Column,
    Gatherer,
    Keys,
    ReplaySchema,
    ReplayStore,
    Subscription,
    SubSequences,
    Uniform,
    gather,
    select,
)
from actors.replay.kernel import COMMITTED, WRITING, address
from actors.replay.selection import Selection

WINDOW = [Subscription(column="obs", length=LENGTH), Subscription(column="action", length=LENGTH)]


def read(store, indices):
    """Whole rows of these indices, as they are now."""
    indices = np.asarray(indices, np.int64)
    n = len(indices)
    keys = Keys(indices, store.status()["generation"][indices - store.base])
    return gather(store, Selection(keys, np.zeros(n, np.int64), np.ones(n), np.ones(n, np.float32)), WINDOW)


def in_memory(store):
    rows = store.snapshot()
    return set(np.flatnonzero((rows["slot"] >= 0) & (rows["tag"] & np.uint64(3) == COMMITTED)).tolist())


def check(batch, numbers):
    expected = content(numbers)
    for name in ("obs", "action"):
        mask = batch.masks[name]
        np.testing.assert_array_equal(batch.values[name][mask], expected[name][:, :LENGTH][mask])


def test_rows_that_are_read_often_return_to_memory(tmp_path):
    store = spilling(tmp_path, capacity=40, slots=10)
    for first in range(0, 40, 10):
        store.insert(content(range(first, first + 10)))
    assert in_memory(store) == set(range(30, 40))
    often = np.array([3, 8, 21])
    for _ in range(8):
        check(read(store, often), often)
    assert set(often.tolist()) < in_memory(store)
    counters = store.counters()
    assert (counters["promoted"], counters["read"], counters["spilled"]) == (3, 24, 33)
    assert counters["read_from_file"] < 24
    for number in range(40, 43):  # they stay, though they were not given their slots last
        for _ in range(2):
            read(store, often)
        store.insert(content([number]))
    assert {8, 21} < in_memory(store)


def test_a_row_that_has_not_changed_is_written_once(tmp_path):
    store = spilling(tmp_path, capacity=4, slots=1)
    store.insert(content([0]))
    store.insert(content([1]))
    for _ in range(3):  # in turn, ever more often: each displaces the other
        for index in (0, 1):
            for _ in range(60):
                check(read(store, [index]), [index])
    assert store.counters()["promoted"] >= 2
    assert store.counters()["spilled"] == 2


def test_uniform_reads_seldom_move_rows(tmp_path):
    store = spilling(tmp_path, capacity=400, slots=100)
    for first in range(0, 400, 100):
        store.insert(content(range(first, first + 100)))
    for draw in range(200):
        gather(store, select(store, Uniform(), 100, seed=0, draw=draw), WINDOW)
    counters = store.counters()
    assert counters["promoted"] < 0.05 * counters["read_from_file"]


def test_skewed_reads_are_served_from_memory(tmp_path):
    """Half of all reads are of a twentieth of the rows, which a table of a tenth in memory would have by chance only."""
    store, rng = spilling(tmp_path, capacity=400, slots=40), np.random.default_rng(0)
    for first in range(0, 400, 40):
        store.insert(content(range(first, first + 40)))
    hot = rng.permutation(400)[:20]
    for turn in range(200):
        if turn == 100:
            before = store.counters()
        chosen = np.where(rng.random(64) < 0.5, rng.choice(hot, 64), rng.integers(0, 400, 64))
        check(read(store, chosen), chosen)
    after = store.counters()
    from_file = after["read_from_file"] - before["read_from_file"]
    assert from_file / (after["read"] - before["read"]) < 0.52  # 0.9 without promotion, 0.45 at best


operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(1, 2)),
        st.tuples(st.just("read"), st.integers(0, 9)),
        st.tuples(st.just("delete"), st.integers(0, 9)),
        st.tuples(st.just("reserve"), st.integers(0, 9)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(2, 4), removal=st.sampled_from(["fifo", "lifo"]), steps=operations)
def test_every_read_is_the_models(tmp_path_factory, slots, removal, steps):
    """Reads of a few rows, so that rows move, between inserts, deletions and cancelled writes."""
    store = spilling(tmp_path_factory.getbasetemp(), capacity=6, slots=slots, removal=removal)
    model, number = {}, 0
    for kind, value in steps:
        if kind == "insert":
            numbers = list(range(number, number + value))
            keys = store.insert(content(numbers))
            model |= dict(zip(keys.indices.tolist(), numbers, strict=True))
            number += value
        elif kind == "reserve":
            with store.allocate() as row:
                row["obs"][:] = -1
                model.pop(row._index, None)
        elif model:
            index = sorted(model)[value % len(model)]
            if kind == "read":
                for _ in range(6):
                    check(read(store, [index]), [model[index]])
            else:
                store.delete(Keys(np.array([index]), store.status()["generation"][index : index + 1]))
                del model[index]
        if model:
            batch = read(store, sorted(model))
            assert batch.current.all()
            check(batch, [model[index] for index in sorted(model)])
        assert len(in_memory(store)) <= slots


def test_readers_and_writers_that_are_killed_leave_every_row_whole(tmp_path):
    """Readers move rows with the lock, beside a writer; all are killed at any moment, and another reads on."""
    rng, store = np.random.default_rng(0), spilling(tmp_path, capacity=24, slots=6)
    store.insert(content(range(6)))

    def write(pipe):
        number = 10
        while True:
            store.insert(content([number]), [1 + number % LENGTH])
            number += 1

    def read_often(pipe):
        draw = 0
        while True:
            chosen = select(store, Uniform(), 8, seed=os.getpid(), draw=draw)
            hot = Keys(*(np.repeat(part[:2], 8) for part in chosen.keys))
            batch = gather(store, Selection(hot, np.zeros(16, np.int64), np.ones(16), np.ones(16)), WINDOW)
            good = batch.current
            check_whole(batch, good)
            draw += 1
            if draw % 4 == 0:
                os.write(pipe, struct.pack("q", draw))

    def check_whole(batch, good):
        obs, mask = batch.values["obs"][good], batch.masks["obs"][good]
        expected = obs[:, :1, :1] + np.arange(LENGTH)[:, None] + np.zeros(3)
        if not ((obs == expected) | ~mask[..., None]).all():
            os._exit(77)

    for _ in range(8):
        readers = [forked(read_often) for _ in range(2)]
        writer, pipe = forked(write)
        for _ in range(int(rng.integers(1, 4))):
            assert os.read(readers[0][1], 8), "a reader got a torn row"
        for child, other in (*readers, (writer, pipe)):
            kill(child)
            os.close(other)
        held = np.flatnonzero(store.status()["state"] == COMMITTED)
        batch = read(store, held)
        assert batch.current.all()
        check(batch, (batch.values["obs"][:, 0, 0] // 100).astype(int))
        slots = store.snapshot()["slot"]
        assert len(set(slots[slots >= 0].tolist())) == (slots >= 0).sum() <= 6
    assert store.counters()["promoted"] > 0
    assert (
        store.edges(store.tree(SubSequences(1).spec)).children[-1, 0].sum()
        == store.status()["length"][held].sum()
    )


def test_a_writer_that_is_killed_when_it_takes_a_slot_leaves_no_row_with_the_bytes_of_another(tmp_path):
    """The row that is overwritten was spilled: the slot that its index gets holds the newest row's bytes."""
    store, indices = spilling(tmp_path, capacity=3, slots=1), np.empty(1, np.int64)
    for number in range(3):
        store.insert(content([number]))
    assert store.snapshot()["slot"].tolist() == [-1, -1, 0]
    allocate, arguments = store._library.replay_allocate, (store.native, 1, address(indices))
    killed_when(lambda: allocate(*arguments), lambda: store._rows["slot"][0] == 0)
    assert store.snapshot()["slot"].tolist() == [0, -1, -1]
    check(read(store, [1, 2]), [1, 2])
    assert store.status()["state"].tolist() == [WRITING, COMMITTED, COMMITTED]
    assert store.reclaim() == 1
    assert store.insert(content([4])).indices.tolist() == [0]
    check(read(store, [0, 1, 2]), [4, 1, 2])


def test_a_row_that_loses_its_slot_during_the_copy_is_read_from_the_file(tmp_path):
    """A batch of one row again and again: it is spilled, and others are written over it, before the copy ends."""
    size, n = 2**15, 128
    schema = ReplaySchema((Column(name="x", dtype="uint8", shape=(size,)),))
    store = ReplayStore.create(schema, 400, memory_bytes=100_000, folder=tmp_path)
    assert store.slots == 1
    store.insert({"x": np.zeros((1, size), np.uint8)})

    def write(pipe):
        for number in range(1, 10**6):
            store.insert({"x": np.full((1, size), number % 256, np.uint8)})

    gatherer = Gatherer(store, [Subscription(column="x")], n, threads=1)
    others = np.zeros(n, np.int64), np.ones(n), np.ones(n, np.float32)
    child, pipe = forked(write)
    try:
        spilled, current = store.counters()["spilled"], 0
        while current < 150:
            status = store.status()
            newest = np.full(n, np.argmax(status["sequence"]))
            batch = gatherer(Selection(Keys(newest, status["generation"][newest]), *others))
            if batch.current.all():
                assert (batch.values["x"] == batch.values["x"][0, 0]).all()
                current += 1
        assert store.counters()["spilled"] > spilled
    finally:
        kill(child)
        os.close(pipe)


def test_a_store_without_a_budget_counts_no_reads():
    store = ReplayStore.create(SCHEMA, 4)
    store.insert(content([1]))
    check(read(store, [0]), [1])
    assert store.counters()["read"] == 0


def test_a_closed_store_keeps_its_file_s_number_as_long_as_a_call_may_use_it(tmp_path):
    """Kernel calls of other threads that are under way read and write by number: it must not become another file's."""

    def open_files():
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return [
            target
            for link in links
            if os.path.lexists(link) and str(tmp_path) in (target := os.readlink(link))
        ]

    store = spilling(tmp_path, capacity=40, slots=10)
    assert len(open_files()) > 0
    store.close()
    assert len(open_files()) == 1
    del store
    gc.collect()
    assert open_files() == []
