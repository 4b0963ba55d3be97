"""Writers are killed at any moment, with the lock or without: nothing torn, nothing lost, nothing left."""

import ctypes
import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from replay_processes import forked, kill, received
from replay_tables import LENGTH, SCHEMA, SELECTORS, content

from actors.replay import (
    Column,
    Prioritized,
    ReplayBusyError,
    ReplaySchema,
    ReplayStore,
    Subscription,
    SubSequences,
    Uniform,
    gather,
    select,
)
from actors.replay.kernel import COMMITTED, FREE, WRITING
from actors.replay.store import _LOCK_AT


def write_rows(store, first):
    """Insert and fill rows in place, in turn; report each after its commit."""

    def work(pipe):
        number = first
        while True:
            if number % 2:
                keys = store.insert(content([number]), [1 + number % LENGTH], [float(number % 5)])
            else:
                row = store.allocate()
                for column, block in content([number]).items():
                    row[column][:] = block[0]
                keys = row.commit(1 + number % LENGTH, float(number % 5))
            os.write(pipe, struct.pack("qqq", number, int(keys.indices[0]), int(keys.generations[0])))
            number += 1

    return work


def check_content(store):
    """All committed rows hold one trajectory each. Returns the number of each by (index, generation)."""
    status = store.status()
    found = {}
    for index in np.flatnonzero(status["state"] == COMMITTED):
        length, number = int(status["length"][index]), int(store.block("obs", index)[0, 0]) // 100
        for column, block in content([number]).items():
            np.testing.assert_array_equal(store.block(column, index)[:length], block[0][:length])
        assert length == 1 + number % LENGTH
        found[int(index), int(status["generation"][index])] = number
    return found


def test_killed_writers_leave_no_torn_row_and_lose_none():
    rng = np.random.default_rng(0)
    store = ReplayStore.create(SCHEMA, 40, selectors=SELECTORS)
    latest = {}  # of each index, the generation and the number that a writer reported last
    for attempt in range(12):
        writers = [forked(write_rows(store, 1000 * (2 * attempt + k))) for k in range(2)]
        wanted = store.counters()["inserted"] + int(rng.integers(1, 60))
        while store.counters()["inserted"] < wanted:  # rows of the store itself are read while others write
            if len(store):
                chosen = select(store, Uniform(), 8, seed=attempt, draw=wanted)
                batch = gather(store, chosen, [Subscription(column="obs", length=LENGTH)])
                rows = batch.values["obs"][batch.current]
                starts = rows[:, :1, :1] + np.arange(LENGTH)[:, None] + np.zeros(3)
                assert ((rows == starts) | ~batch.masks["obs"][batch.current][..., None]).all()
        for child, _ in writers:
            kill(child)
        for _, pipe in writers:
            for number, index, generation in received(pipe):
                if generation > latest.get(index, (0, 0))[0]:
                    latest[index] = generation, number
        store.reclaim()
        held = check_content(store)
        for index, (generation, number) in latest.items():
            now = int(store.status()["generation"][index])
            assert now > generation or held[index, generation] == number
    assert store.counters()["writing"] == 0
    assert not (store.status()["state"] == WRITING).any()
    expected = sum(row["state"] == COMMITTED for row in store.status())
    assert store.edges(store.tree(Uniform().spec)).children[-1, 0].sum() == len(store) == expected
    store.insert(content(range(40)), 1 + np.arange(40) % LENGTH)  # every block has returned
    assert len(check_content(store)) == 40
    # Its files have no name; other tests may use /dev/shm meanwhile.
    assert [name for name in os.listdir("/dev/shm") if "replay" in name] == []


def test_the_row_of_a_killed_writer_is_given_to_the_next_who_needs_it():
    store = ReplayStore.create(SCHEMA, 2)
    store.insert(content([1]))

    def work(pipe):
        store.allocate()["obs"][:] = -1
        os.write(pipe, bytes(24))
        signal.pause()

    child, pipe = forked(work)
    os.read(pipe, 24)
    assert (store.counters()["writing"], store.reclaim()) == (1, 0)  # it is alive
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # ended, but still in the process table
    keys = store.insert(content([2]))
    assert keys.indices.tolist() == [1]
    assert store.counters()["reclaimed"] == 1
    assert store.counters()["evicted"] == 0
    os.waitpid(child, 0)
    os.close(pipe)


def test_a_suspended_writer_keeps_its_row_and_stops_nobody_else():
    store = ReplayStore.create(SCHEMA, 3)

    def hold(pipe):
        store.allocate()
        os.write(pipe, b"x")
        signal.pause()

    child, read = forked(hold)
    os.read(read, 1)
    os.close(read)
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    for number in range(8):
        store.insert(content([number]))
    assert store.reclaim() == 0
    assert (len(store), store.counters()["writing"]) == (2, 1)
    with pytest.raises(ReplayBusyError, match="3 rows requested of 3, with 1 being written"):
        store.insert(content(range(3)))
    kill(child)  # SIGKILL ends suspended processes, too
    assert store.reclaim() == 1
    assert len(store.insert(content(range(3))).indices) == 3


def test_a_suspended_holder_of_the_lock_is_named_instead_of_awaited_for_ever(monkeypatch):
    monkeypatch.setattr("actors.replay.store.LOCK_LIMIT_S", 0.05)
    store = ReplayStore.create(SCHEMA, 2)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock.argtypes = libc.pthread_mutex_unlock.argtypes = (ctypes.c_void_p,)
    libc.pthread_mutex_lock(store._native.header + _LOCK_AT)
    with pytest.raises(ReplayBusyError, match=r"another process has held the store's lock for 0.05 s"):
        store.insert(content([1]))
    libc.pthread_mutex_unlock(store._native.header + _LOCK_AT)
    store.insert(content([1]))


def test_a_row_whose_cancel_did_not_get_the_lock_can_be_cancelled_again(monkeypatch):
    monkeypatch.setattr("actors.replay.store.LOCK_LIMIT_S", 0.05)
    store = ReplayStore.create(SCHEMA, 1)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock.argtypes = libc.pthread_mutex_unlock.argtypes = (ctypes.c_void_p,)
    row = store.allocate()
    libc.pthread_mutex_lock(store._native.header + _LOCK_AT)
    with pytest.raises(ReplayBusyError, match="another process has held the store's lock"):
        row.cancel()
    libc.pthread_mutex_unlock(store._native.header + _LOCK_AT)
    assert store.counters()["writing"] == 1
    row.cancel()
    row.cancel()
    assert store.counters()["writing"] == 0


def test_rows_whose_commit_did_not_get_the_lock_are_taken_back(monkeypatch):
    monkeypatch.setattr("actors.replay.store.LOCK_LIMIT_S", 0.05)
    rows = {"x": np.zeros((4, 1 << 22), np.float32)}  # copied in milliseconds: time to take the lock
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock.argtypes = libc.pthread_mutex_unlock.argtypes = (ctypes.c_void_p,)
    schema = ReplaySchema((Column(name="x", dtype=np.float32, shape=(1 << 22,)),))
    with ThreadPoolExecutor(1) as threads:
        for _ in range(20):
            store = ReplayStore.create(schema, 4)
            inserted = threads.submit(store.insert, rows)
            while not store.counters()["writing"] and not inserted.done():
                pass
            libc.pthread_mutex_lock(store._native.header + _LOCK_AT)
            failed = inserted.exception()
            libc.pthread_mutex_unlock(store._native.header + _LOCK_AT)
            if failed is not None:
                break
    assert isinstance(failed, ReplayBusyError)
    assert store.counters()["writing"] == 4
    assert len(store.insert(rows).indices) == 4
    assert store.counters()["reclaimed"] == 4


def test_a_forked_reader_has_threads_of_its_own(monkeypatch):
    monkeypatch.setattr("actors.replay.subscriptions._BYTES_PER_START", 1)
    store = ReplayStore.create(SCHEMA, 4)
    store.insert(content(range(4)))
    chosen = select(store, Uniform(), 8, seed=0, draw=0)
    gather(store, chosen, [Subscription(column="obs")], threads=3)

    def work(pipe):
        found = gather(store, chosen, [Subscription(column="obs")], threads=3)
        os.write(pipe, struct.pack("qqq", *[int(found.current.sum())] * 3))

    child, pipe = forked(work)
    assert received(pipe) == [(8, 8, 8)]
    os.waitpid(child, 0)


@pytest.mark.parametrize("harm", ["lists", "trees", "bits", "queue"])
def test_a_process_that_dies_with_the_lock_leaves_a_usable_store(harm):
    store = ReplayStore.create(SCHEMA, 6, selectors=(Uniform(), Prioritized(0.5), SubSequences(2)))
    keys = store.insert(content(range(5)), priorities=[1, 2, 3, 4, 5])
    store.delete(type(keys)(keys.indices[1:2], keys.generations[1:2]))
    before, reserved = store.status(), store.allocate()

    def lists():
        selectors = (Uniform(), Prioritized(0.5), SubSequences(2))
        return [select(store, selector, 9, seed=0, draw=1).keys.indices.tolist() for selector in selectors]

    draws = lists()

    def work(pipe):
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock.argtypes = (ctypes.c_void_p,)
        lock(store._native.header + _LOCK_AT)
        header = store._header
        header.version |= 1
        if harm == "lists":
            header.count, header.oldest, header.newest, header.writers, header.writing = 77, 5, 5, -1, 0
        elif harm == "queue":
            header.first_free, header.last_free, header.free = 2, 2, 1
        elif harm == "bits":  # of Uniform: rows that are gone, and some of those that are not
            ctypes.memset(store._tree_structs[0].level[0], 0b110, 1)
        else:
            tree = store._tree_structs[1]
            ctypes.memset(tree.level[0], 0, 48)
            ctypes.memset(tree.level[1], 0, 8)
        os.kill(os.getpid(), signal.SIGKILL)

    child, pipe = forked(work)
    os.waitpid(child, 0)
    os.close(pipe)
    assert lists() == draws
    assert store.counters()["recovered"] == 1
    assert (len(store), store.counters()["writing"]) == (4, 1)
    reserved.cancel()
    after = store.status()
    for name in ("priority", "length", "sequence"):
        np.testing.assert_array_equal(after[name], before[name])
    assert sorted(store.insert(content([7, 8])).indices) == [1, 5]
    assert store.insert(content([9])).indices.tolist() == [0]
    assert not (store.status()["state"] == FREE).any()
