"""Checkpoints: a restored store goes on as the saved one would have; kills, full disks and damage leave the former one."""

import errno
import json
import os
import re
import select as polling
import shutil
import socket
import subprocess
import time
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from replay_tables import LENGTH, SCHEMA, SELECTORS, content, spilling
from test_kills import forked, kill

from actors.replay import (
    Column,
    Keys,
    ReplayBusyError,
    ReplayCheckpointer,
    ReplayCheckpointError,
    ReplayError,
    ReplaySchema,
    ReplayStore,
    Subscription,
    Uniform,
    checkpoint,
    checkpoint_files,
    gather,
    kernel,
    select,
)
from actors.replay.checkpoint_files import ENTRY, STATUS, digest
from actors.replay.kernel import COMMITTED, REMOVALS, HeaderStruct
from actors.replay.rows import Frozen

CAPACITY = 7
WINDOWS = [
    Subscription(column="obs", length=LENGTH + 1),
    Subscription(column="action", length=LENGTH, padding="tail"),
]


def made(folder=None, slots=None, capacity=CAPACITY, **rules):
    """A store; with ``slots``, only so many rows are in memory."""
    if slots is None:
        return ReplayStore.create(SCHEMA, capacity, selectors=SELECTORS, **rules)
    return spilling(folder, capacity, slots, **rules)


def restored(directory, **like):
    store = made(**like)
    return store, ReplayCheckpointer(store).restore(directory)


def insert(store, first, count, seed):
    rng, numbers = np.random.default_rng(seed), np.arange(first, first + count)
    lengths, priorities = rng.integers(1, LENGTH + 1, count), rng.integers(0, 5, count).astype(float)
    return store.insert(content(numbers), lengths, priorities, rng.integers(0, 9, count))


def draws(store, draw):
    """What every selector selects, and the content of these rows; or why not."""
    found = []
    for selector in SELECTORS:
        try:
            chosen = select(store, selector, 3, seed=5, draw=draw)
        except ReplayError as error:
            found.append(str(error))
            continue
        batch = gather(store, chosen, WINDOWS)
        columns = (chosen.steps, chosen.probabilities, chosen.weights, chosen.lengths)
        found.append([chosen.keys.indices, *columns, *batch.values.values(), *batch.masks.values()])
    return found


def assert_alike(one, other):
    for mine, theirs in zip(one, other, strict=True):
        if isinstance(mine, str):
            assert mine == theirs
        else:
            for x, y in zip(mine, theirs, strict=True):
                np.testing.assert_array_equal(x, y)


def committed(store):
    status = store.status()
    return status[status["state"] == COMMITTED]


def step(store, kind, a, b, number):
    """One change of a store, by its arguments and its own status alone."""
    if kind == "insert":
        return insert(store, number, a % 3 + 1, b).indices.tolist()
    rows = committed(store)
    if not len(rows):
        return None
    row = rows[a % len(rows)]
    keys = Keys(np.array([row["index"]]), np.array([row["generation"]], np.uint64))
    if kind == "delete":
        return store.delete(keys)
    if kind == "update":
        return store.update_priorities(keys, float(b))
    draws(store, b)  # uses rows up, if max_times_sampled says so
    return len(store)


steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "delete", "update", "draw"]),
        st.integers(0, 9),
        st.integers(0, 99),
    ),
    max_size=12,
)


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    removal=st.sampled_from(REMOVALS[:5]),
    limit=st.sampled_from([0, 0, 40]),
    slots=st.sampled_from([None, 3]),
    later=st.sampled_from([None, 5]),
    history=st.lists(steps, min_size=1, max_size=3),
    future=steps,
    reserved=st.integers(0, 2),
)
def test_a_restored_store_goes_on_as_the_saved_one(
    tmp_path_factory, removal, limit, slots, later, history, future, reserved
):
    """Whatever happened before, with one checkpoint or several, with another memory budget or the same."""
    folder = tmp_path_factory.mktemp("checkpoint")
    rules = {"removal": removal, "max_times_sampled": limit, "seed": 3}
    store, number = made(folder, slots, **rules), 0
    checkpointer = ReplayCheckpointer(store)
    for part in history:
        for kind, a, b in part:
            step(store, kind, a, b, number)
            number += 3
        rows = sorted([store.allocate() for _ in range(reserved)], key=lambda row: row._index)
        with mock.patch.object(os, "fsync"):  # only a power cut needs it
            saved = checkpointer.save(folder, {"number": number})
        for row in rows:  # the restored store has them back, too
            row.cancel()
        assert (saved.rows, saved.left_out) == (len(store), 0)
    other, found = restored(folder, folder=folder, slots=later, **rules)
    assert (found.state, found.damaged) == ({"number": number}, ())
    np.testing.assert_array_equal(committed(other), committed(store))
    for kind, a, b in [*future, ("draw", 0, 7)]:
        if not (slots or later):
            np.testing.assert_array_equal(committed(other), committed(store))
        assert step(other, kind, a, b, number) == step(store, kind, a, b, number)
        assert_alike(draws(other, a), draws(store, a))
        number += 3
    tiers = dict.fromkeys(("spilled", "promoted", "read", "read_from_file"))  # of this memory budget
    assert {**other.counters(), **tiers} == {**store.counters(), **tiers}


def test_only_new_blocks_are_written_and_old_ones_are_freed(tmp_path):
    store = made(capacity=10)
    checkpointer = ReplayCheckpointer(store)
    row = 9 * 12 + 8 * 2 + 8
    written = []
    for count in (10, 2, 2, 2, 0):
        store.insert(content(range(count)))
        saved = checkpointer.save(tmp_path, keep=1)
        written.append((saved.written_bytes // row, saved.linked_bytes // row))
    # Of the first ten, 8 are needed after two more, then 6, then 4: fewer than half, so that these 4 are written again.
    assert written == [(10, 0), (2, 10), (2, 12), (6, 4), (0, 10)]
    assert sorted(os.listdir(tmp_path / "000005")) == [
        *("manifest", "queue.bin", "segment_000002.bin", "segment_000003.bin", "segment_000004.bin"),
        "status.bin",
    ]
    assert os.listdir(tmp_path) == ["000005"]
    assert (tmp_path / "000005" / "segment_000002.bin").stat().st_nlink == 1


def test_a_checkpoint_has_a_bounded_number_of_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_SEGMENTS", 3)
    store = made(capacity=40)
    checkpointer = ReplayCheckpointer(store)
    for number in range(12):
        insert(store, number, 3, number)
        checkpointer.save(tmp_path)
        found = [name for name in os.listdir(tmp_path / f"{number + 1:06d}") if name.startswith("segment")]
        assert len(found) <= 3
    np.testing.assert_array_equal(committed(restored(tmp_path, capacity=40)[0]), committed(store))


def test_a_moved_checkpoint_is_linked_and_a_removed_one_is_written_again(tmp_path):
    store = made()
    insert(store, 0, 7, 0)
    checkpointer = ReplayCheckpointer(store)
    checkpointer.write(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a").rename(tmp_path / "elsewhere" / "b")
    assert checkpointer.write(tmp_path / "c").written_bytes == 0
    shutil.rmtree(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "c")
    assert checkpointer.write(tmp_path / "d").linked_bytes == 0
    with pytest.raises(ReplayError, match="exists already: a checkpoint is written into a new folder"):
        checkpointer.write(tmp_path / "d")


def test_a_resumed_process_goes_on_incrementally_and_another_history_is_not_mixed_in(tmp_path):
    store = made()
    insert(store, 0, 5, 0)
    stale = ReplayCheckpointer(store)
    stale.write(tmp_path / "a")
    insert(store, 50, 2, 1)
    stale.write(tmp_path / "b")
    resumed = ReplayCheckpointer(store)
    resumed.read(tmp_path / "a")
    insert(store, 90, 2, 1)  # the same indices and generations as of "b", and other content
    assert resumed.write(tmp_path / "c").linked_bytes > 0
    assert stale.write(tmp_path / "d").linked_bytes == 0
    for name in "cd":
        other = made()
        ReplayCheckpointer(other).read(tmp_path / name)
        assert [int(other.block("obs", index)[0, 0]) // 100 for index in range(7)] == [0, 1, 2, 3, 4, 90, 91]


def test_a_larger_store_has_the_same_rows_and_uses_its_new_indices_last(tmp_path):
    store = made()
    keys = insert(store, 0, 7, 0)
    store.delete(Keys(keys.indices[2:3], keys.generations[2:3]))
    ReplayCheckpointer(store).save(tmp_path)
    other, _ = restored(tmp_path, capacity=9)
    assert_alike(draws(other, 1), draws(store, 1))
    assert sorted(insert(other, 10, 3, 0).indices) == [2, 7, 8]
    assert insert(other, 10, 1, 0).indices.tolist() == [0]


def test_an_empty_store_and_one_row(tmp_path):
    store = made(capacity=1)
    checkpointer = ReplayCheckpointer(store)
    assert checkpointer.save(tmp_path)[1:] == (0, 0, 0, 0)
    assert len(restored(tmp_path, capacity=1)[0]) == 0
    insert(store, 5, 1, 0)
    assert checkpointer.save(tmp_path).rows == 1
    other, _ = restored(tmp_path, capacity=1)
    assert other.block("obs", 0)[0, 0] == 500
    assert ReplayCheckpointer(other).restore(tmp_path).folder.name == "000002"  # over its own rows
    assert other.block("obs", 0)[0, 0] == 500
    with other.allocate(), pytest.raises(ReplayBusyError):
        ReplayCheckpointer(other).restore(tmp_path)


@pytest.mark.parametrize("slots", [None, 6])
def test_rows_saved_while_others_write_are_those_of_one_instant(tmp_path, slots):
    """With one writer and removal by age, the rows of an instant are consecutive."""
    store = made(tmp_path, slots, capacity=30)

    def write(pipe):
        number = 0
        while True:
            store.insert(content([number]), [1 + number % LENGTH], timestamps=number)
            if number == 40:
                os.write(pipe, b"x")
            number += 1

    child, pipe = forked(write)
    os.read(pipe, 1)
    checkpointer, other = ReplayCheckpointer(store), made(capacity=30)
    try:
        for _ in range(12):
            assert checkpointer.save(tmp_path / "x").left_out == 0
            ReplayCheckpointer(other).restore(tmp_path / "x")
            rows = committed(other)
            numbers = np.sort(rows["timestamp"])
            assert len(rows) in (29, 30)  # one may be being written
            np.testing.assert_array_equal(numbers, numbers[0] + np.arange(len(rows)))
            for row in rows:
                for column, block in content([row["timestamp"]]).items():
                    length = 1 + int(row["timestamp"]) % LENGTH
                    np.testing.assert_array_equal(
                        other.block(column, row["index"])[:length], block[0][:length]
                    )
    finally:
        kill(child)
        os.close(pipe)


def test_rows_that_are_overwritten_again_and_again_are_left_out_and_counted(tmp_path, monkeypatch):
    store = made(removal="lifo")
    insert(store, 0, 7, 0)
    pack = store.pack

    def overtaken(*arguments):
        insert(store, 100, 1, 0)  # replaces the newest row
        return pack(*arguments)

    monkeypatch.setattr(store, "pack", overtaken)
    saved = ReplayCheckpointer(store).save(tmp_path)
    assert (saved.rows, saved.left_out) == (6, 1)
    other, _ = restored(tmp_path, removal="lifo")
    assert (len(other), insert(other, 9, 1, 0).indices.tolist()) == (6, [6])


def test_little_memory_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 2**20)
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 2**20)
    schema = ReplaySchema((Column(name="x", dtype="uint8", shape=(2**17,)),))
    store, other = (ReplayStore.create(schema, 200) for _ in range(2))
    store.insert({"x": np.arange(200, dtype=np.uint8)[:, None] + np.zeros((1, 2**17), np.uint8)})
    tracemalloc.start()
    assert ReplayCheckpointer(store).save(tmp_path).written_bytes == 25 * 2**20
    ReplayCheckpointer(other).restore(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * 2**20
    assert (other.block("x", 150) == 150).all()


# ---- kills and full disks

CALLS = ("write", "fsync", "link", "rename", "rmdir", "unlink", "mkdir", "open")


def dying(number, fate):
    """Replaces file system calls of os: before call ``number`` of them, ``fate`` is called."""
    count = 0
    for name in CALLS:
        original = getattr(os, name)

        def call(*arguments, _original=original, **named):
            nonlocal count
            count += 1
            if count == number:
                fate()
            return _original(*arguments, **named)

        setattr(os, name, call)


def test_a_process_that_dies_before_any_file_operation_leaves_a_checkpoint(tmp_path, monkeypatch):
    """Before each operation of a third save, which links, writes and removes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # only a power cut needs it
    store, base, code = made(), tmp_path / "base", 9
    checkpointer = ReplayCheckpointer(store)
    keys = insert(store, 0, 7, 0)
    checkpointer.save(base)
    checkpointer.save(base)
    store.delete(Keys(keys.indices[:3], keys.generations[:3]))
    insert(store, 9, 1, 0)
    for number in range(1, 80):
        folder = tmp_path / str(number)
        shutil.copytree(base, folder, copy_function=os.link)

        def work(pipe, number=number, folder=folder):
            dying(number, lambda: os._exit(9))
            checkpointer.save(folder)
            os._exit(0)

        child, pipe = forked(work)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(pipe)
        other, found = restored(folder)
        assert found.damaged == ()
        assert len(other) == {"000002": 7, "000003": 5}[found.folder.name]
        if code == 0:
            break
        checkpointer.save(folder)
        assert [name for name in os.listdir(folder) if not name.isdigit()] == []
    assert (code, number > 20) == (0, True)


def test_a_process_that_is_killed_at_any_moment_leaves_a_checkpoint(tmp_path):
    rng, last, store = np.random.default_rng(0), 0, made(capacity=20)
    kills = 25

    def work(pipe):
        checkpointer = ReplayCheckpointer(store)
        if os.listdir(tmp_path):
            checkpointer.restore(tmp_path)
        while True:
            first = store.counters()["inserted"]
            store.insert(content(range(first, first + 3)), timestamps=np.arange(first, first + 3))
            saved = checkpointer.save(tmp_path, {"inserted": first + 3})
            os.write(pipe, int(saved.folder.name).to_bytes(8, "little"))

    save_s = 0.0
    for attempt in range(kills):
        child, pipe = forked(work)
        for _ in range(2 if not attempt else int(rng.integers(0, 2))):
            started = time.perf_counter()
            os.read(pipe, 8)
        if not attempt:
            save_s = time.perf_counter() - started
        polling.select([], [], [], float(rng.uniform(0, 1.5 * save_s)))  # anywhere in the next save
        kill(child)
        with os.fdopen(pipe, "rb") as reports:
            reported = reports.read()
        other, found = restored(tmp_path, capacity=20)
        number, inserted = int(found.folder.name), found.state["inserted"]
        assert found.damaged == ()
        assert number >= max([last, *np.frombuffer(reported, np.int64)])  # what was reported is not lost
        last = number
        rows = committed(other)
        np.testing.assert_array_equal(np.sort(rows["timestamp"]), np.arange(max(0, inserted - 20), inserted))
        for row in rows:
            assert other.block("obs", row["index"])[0, 0] == 100 * row["timestamp"]
    assert last > 10


def error_of(act):
    try:
        act()
    except ReplayCheckpointError as error:
        return error
    return None


def test_a_full_disk_leaves_the_former_checkpoint(tmp_path, monkeypatch):
    store = made()
    insert(store, 0, 5, 0)
    checkpointer = ReplayCheckpointer(store)
    checkpointer.save(tmp_path)
    insert(store, 5, 4, 0)

    for number in range(1, 60):
        hit, newest = [], restored(tmp_path)[1].folder.name

        def full(hit=hit):
            hit.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, getattr(os, name))
            dying(number, full)
            error = error_of(lambda: checkpointer.save(tmp_path))
        if not hit:
            break
        if error is not None:
            assert restored(tmp_path)[1].folder.name == newest
            assert re.fullmatch(
                r"replay checkpoint .* cannot be written \(No space left on device\): earlier ones stay; free space there, "
                "or choose another folder",
                str(error),
            )
    assert (error, number > 10) == (None, True)
    assert len(restored(tmp_path)[0]) == 7


# ---- damage


def saved_folder(tmp_path):
    store = made()
    insert(store, 0, 6, 0)
    ReplayCheckpointer(store).save(tmp_path)
    return tmp_path / "000001"


def test_every_changed_byte_is_found(tmp_path):
    folder, rng, target = saved_folder(tmp_path), np.random.default_rng(0), made()
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for at in {0, len(whole) - 1, *rng.integers(0, len(whole), 20).tolist()}:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            with pytest.raises(ReplayCheckpointError, match="is damaged: "):
                ReplayCheckpointer(target).read(folder)
            assert len(target) == 0
        for size in (0, len(whole) - 1):
            path.write_bytes(whole[:size])
            with pytest.raises(ReplayCheckpointError, match="is damaged: "):
                ReplayCheckpointer(target).read(folder)
        path.unlink()
        with pytest.raises(ReplayCheckpointError, match=r"cannot be opened \(No such file"):
            ReplayCheckpointer(target).read(folder)
        os.mkfifo(path)
        with pytest.raises(ReplayCheckpointError, match="is not a regular file"):
            ReplayCheckpointer(target).read(folder)
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(ReplayCheckpointError, match="cannot be opened"):
            ReplayCheckpointer(target).read(folder)
        path.unlink()
        path.write_bytes(whole)
    assert ReplayCheckpointer(target).read(folder).folder == folder
    assert len(target) == 6


def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(tmp_path):
    store = made()
    checkpointer = ReplayCheckpointer(store)
    for number in range(2):
        insert(store, number, 1, 0)
        checkpointer.save(tmp_path)
    (tmp_path / "000002" / "segment_000002.bin").write_bytes(b"")
    other, found = restored(tmp_path)
    assert (len(other), found.folder.name) == (1, "000001")
    assert len(found.damaged) == 1
    assert "segment_000002.bin has 0 bytes" in found.damaged[0]
    with pytest.raises(ReplayCheckpointError, match="has no replay checkpoint"):
        ReplayCheckpointer(other).restore(tmp_path / "none")


def signed(folder, change, name=None, dtype=None):
    """Change the manifest, or an array and its checksum in the manifest, and sign it again."""
    _, body = (folder / "manifest").read_text().splitlines()
    values = json.loads(body)
    if name is None:
        change(values)
    elif name == "entries":
        path = folder / "segment_000001.bin"
        blocks, entries = path.read_bytes()[: -6 * ENTRY.itemsize], path.read_bytes()[-6 * ENTRY.itemsize :]
        array = np.frombuffer(entries, ENTRY).copy()
        change(array)
        path.write_bytes(blocks + array.tobytes())
        values["segments"][0]["entries"] = digest(array)
    else:
        array = np.frombuffer((folder / f"{name}.bin").read_bytes(), dtype).copy()
        change(array)
        (folder / f"{name}.bin").write_bytes(array.tobytes())
        values[name] = digest(array)
    body = json.dumps(values)
    (folder / "manifest").write_text(f"{digest(body.encode())}\n{body}\n")


def put(*path):
    """Sets values[path[0]][path[1]]... to the last argument."""

    def change(values):
        for key in path[:-2]:
            values = values[key]
        if isinstance(values, np.ndarray) and values.dtype.names:
            values = values[:1]
        values[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "array", "message"),
    [
        (put("version", 2), None, "has version 2 where this version of rayagi reads 1"),
        (put("format", "other"), None, "manifest is not one of a replay checkpoint"),
        (put("segments", 0, "pieces", [[6]]), None, "manifest is not one of a replay checkpoint"),
        (put("segments", 0, "pieces", [[6, "a", 1]]), None, "manifest is not one of a replay checkpoint"),
        (put("capacity", 10**9), None, "1,000,000,000 rows where this one has 7; at least as many"),
        (put("capacity", True), None, "manifest is not one"),
        (put("capacity", -1), None, "manifest is not one"),
        (put("capacity", 6), None, "status.bin has 308 bytes|more than 264"),
        (put("free", 8), None, "manifest is not one"),
        (put("segments", []), None, "a row of its status has no blocks"),
        (put("segments", 0, "number", "../../x"), None, "manifest is not one"),
        (put("segments", 0, "number", 7), None, "segment_000007.bin cannot be opened"),
        (put("segments", 0, "rows", 5), None, "manifest is not one"),
        (put("segments", 0, "pieces", [[6, "0"]]), None, "piece 0 of segment_000001.bin does not match"),
        (put("segments", 0, "pieces", [[10**9, "0"]]), None, "manifest is not one"),
        (put("segments", 3), None, "manifest is not one"),
        (put("counters", {}), None, "manifest is not one"),
        (put("counters", "sequence", 2), None, "its status is none that a store can have"),
        (put("counters", "inserted", 2**64), None, "manifest is not one"),
        (put("state", []), None, "manifest is not one"),
        (put("schema", "columns", [["obs", "|O", [], 0]]), None, "manifest is not one"),
        (
            put("schema", "max_length", 9),
            None,
            r"is of a store with obs: float32\[3\]\+1, .* max_length 9 where",
        ),
        (put("removal", "lifo"), None, r"removal and max_times_sampled \('lifo', 0\) where this one has"),
        (put("num_shards", 2), None, r"shards \(0, 2\) where this one has shards \(0, 1\)"),
        (put(0, 0), ("queue", "<u4"), "its status is none"),
        (put(0, 2**32 - 1), ("queue", "<u4"), "its status is none"),
        (put("length", 9), ("status", STATUS), "its status is none"),
        (put("length", 0), ("status", STATUS), "its status is none"),
        (put("generation", 2**63), ("status", STATUS), "its status is none"),
        (put("generation", 9), ("status", STATUS), "a row of its status has no blocks"),
        (put("priority", np.nan), ("status", STATUS), "its status is none"),
        (put("priority", -1), ("status", STATUS), "its status is none"),
        (put("timestamp", -1), ("status", STATUS), "its status is none"),
        (put("sequence", 2), ("status", STATUS), "its status is none"),
        (put("index", 7), ("entries",), "has a row of an index that does not exist"),
        (put("index", 2**32 - 1), ("entries",), "has a row of an index that does not exist"),
        (put("length", 2**32 - 1), ("entries",), "which do not match its rows"),
        (put("generation", 8), ("entries",), "a row of its status has no blocks"),
    ],
)
def test_a_hostile_checkpoint_is_explained_in_one_sentence(tmp_path, change, array, message):
    folder, target = saved_folder(tmp_path), made()
    signed(folder, change, *(array or ()))
    with pytest.raises(ReplayCheckpointError, match=message) as raised:
        ReplayCheckpointer(target).read(folder)
    assert "\n" not in str(raised.value)
    assert len(target) == 0
    insert(target, 0, 7, 0)  # it is still a store


def test_a_nested_manifest_and_a_state_that_is_no_json_are_refused(tmp_path):
    folder = saved_folder(tmp_path)
    body = '{"state": ' + "[" * 100_000 + "]" * 100_000 + "}"
    (folder / "manifest").write_text(f"{digest(body.encode())}\n{body}\n")
    with pytest.raises(ReplayCheckpointError, match="manifest is not one of a replay checkpoint"):
        ReplayCheckpointer(made()).read(folder)
    for state in ({"draw": np.int64(3)}, {"seed": float("nan")}):
        with pytest.raises(ReplayCheckpointError, match="the state to be saved with a replay is no JSON"):
            ReplayCheckpointer(made()).write(tmp_path / "x", state)
    assert os.listdir(tmp_path) == ["000001"]


def test_shards_are_restored_where_they_were(tmp_path):
    shards = [made(shard=shard, num_shards=3) for shard in range(3)]
    for shard, store in enumerate(shards):
        insert(store, 10 * shard, 5, shard)
        ReplayCheckpointer(store).write(tmp_path / str(shard))
    others = [made(shard=shard, num_shards=3) for shard in range(3)]
    for shard, store in enumerate(others):
        ReplayCheckpointer(store).read(tmp_path / str(shard))
    one, two = (select(table, Uniform(), 20, seed=1, draw=2) for table in (shards, others))
    np.testing.assert_array_equal(one.keys.indices, two.keys.indices)
    with pytest.raises(ReplayCheckpointError, match=r"shards \(1, 3\) where this one has shards \(0, 3\)"):
        ReplayCheckpointer(others[0]).read(tmp_path / "1")
    with pytest.raises(
        ReplayCheckpointError, match="7 rows where this one has 8; of shards, the same is needed"
    ):
        ReplayCheckpointer(made(shard=0, num_shards=3, capacity=8)).read(Path(tmp_path / "0"))


def test_a_process_that_is_killed_while_it_replaces_rows_leaves_none_without_its_blocks():
    """Whoever goes on believes the tags of the status table."""
    rows = 100_000
    store = ReplayStore.create(ReplaySchema((Column(name="x", dtype="float32", shape=(1,)),)), rows)
    empty = np.zeros(rows, kernel.ROW)
    delays = np.random.default_rng(0).uniform(0, 1.2e-3, 12)
    for delay in delays:
        store.insert({"x": np.ones((rows, 1), np.float32)})
        # All rows free, as a restore begins.
        empty["tag"] = store.snapshot()["tag"] >> np.uint64(2) << np.uint64(2)
        empty["slot"] = np.arange(rows)
        frozen = Frozen(HeaderStruct(random=1), empty, np.arange(rows, dtype=np.int32))

        def replace_all(write, frozen=frozen):
            os.write(write, b"x")
            store.thaw(frozen)

        child, read = forked(replace_all)
        os.read(read, 1)
        end = time.perf_counter() + delay
        while time.perf_counter() < end:
            pass
        kill(child)
        os.close(read)
        status = store.status()
        selectable = status["state"] == COMMITTED
        assert (status["length"][selectable] == 1).all()


def test_what_a_killed_process_left_of_a_checkpoint_is_removed_by_the_next(tmp_path):
    """Not what belongs to a living process or to another place."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = socket.gethostname()
    gone = tmp_path / f".replay.{here}.{ended.pid}.unfinished"
    kept = [
        tmp_path / f".replay.{here}.{os.getppid()}.unfinished",
        tmp_path / f".x.{here}.{ended.pid}.unfinished",
    ]
    for left in (gone, *kept):
        left.mkdir()
        (left / "status.bin").touch()
    ReplayCheckpointer(made()).write(tmp_path / "replay")
    assert {*tmp_path.iterdir()} == {tmp_path / "replay", *kept}
