"""The store against a model in plain Python: allocator, status table, removal, trees; spilling; bad input."""

import collections
import errno
import gc
import os
import pickle
import resource
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_tables import LENGTH, SCHEMA, SELECTORS, content

from actors.replay import (
    Column,
    Keys,
    ReplayBusyError,
    ReplayError,
    ReplaySchema,
    ReplayStore,
    Subscription,
    SubSequences,
    WithoutReplacement,
    gather,
    kernel,
    memory,
)
from actors.replay import store as store_module
from actors.replay.kernel import COMMITTED, DELETED, FREE, REMOVALS, WRITING
from actors.replay.selection import Selection

CAPACITY = 7


class Model:
    """What a store does, row by row."""

    def __init__(self, removal):
        self.removal, self.queue, self.sequence = removal, collections.deque(range(CAPACITY)), 0
        self.rows = [{"generation": 0, "state": FREE} for _ in range(CAPACITY)]
        self.content = [None] * CAPACITY

    def committed(self):
        return [index for index, row in enumerate(self.rows) if row["state"] == COMMITTED]

    def victim(self):
        order = {
            "fifo": lambda i: self.rows[i]["sequence"],
            "lifo": lambda i: -self.rows[i]["sequence"],
            "oldest": lambda i: (self.rows[i]["timestamp"], i),
            "lowest_priority": lambda i: (self.rows[i]["priority"], i),
        }
        return min(self.committed(), key=order[self.removal])

    def allocate(self):
        index = self.queue.popleft() if self.queue else self.victim()
        row = self.rows[index]
        self.rows[index] = {"generation": row["generation"] + 1, "state": WRITING}
        return index

    def commit(self, index, number, length, priority, timestamp):
        self.sequence += 1
        self.rows[index] |= {
            "state": COMMITTED,
            "length": length,
            "priority": priority,
            "timestamp": timestamp,
            "sequence": self.sequence,
            "sampled": 0,
        }
        self.content[index] = number

    def free(self, index, state):
        self.rows[index]["state"] = state
        self.queue.append(index)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(1, 3), st.integers(0, 5), st.integers(0, 9)),
        st.tuples(
            st.sampled_from(["reserve", "commit", "cancel", "delete", "update"]), *[st.integers(0, 9)] * 3
        ),
    ),
    max_size=40,
)


def check(store, model):
    """Status, content and sums are the model's."""
    status = store.status()
    for index, row in enumerate(model.rows):
        for name, value in row.items():
            assert status[name][index] == value, (index, name)
        if row["state"] == COMMITTED:
            assert store.block("obs", index)[0, 0] == 100 * model.content[index]
    committed = model.committed()
    assert len(store) == len(committed)
    for spec in store.specs:
        kinds = {
            0: lambda row: 1.0,
            1: lambda row, spec=spec: max(0, (row["length"] - spec.length) // spec.stride + 1),
            2: lambda row, spec=spec: (
                row["priority"] ** spec.exponent * (row["length"] >= spec.length) * (row["priority"] > 0)
            ),
        }
        if spec.kind in kinds:
            expected = sum(kinds[spec.kind](model.rows[index]) for index in committed)
            top = store.edges(store.tree(spec)).children[-1, 0].sum()
            assert top == pytest.approx(expected, rel=1e-12)


@settings(max_examples=80, deadline=None)
@given(removal=st.sampled_from(REMOVALS[:4]), steps=operations)
def test_a_store_does_what_the_model_does(removal, steps):
    store, model, reserved = (
        ReplayStore.create(SCHEMA, CAPACITY, selectors=SELECTORS, removal=removal),
        Model(removal),
        [],
    )
    number = 0
    for kind, a, b, c in steps:
        if kind == "insert" and len(reserved) + a <= CAPACITY:
            numbers, lengths = list(range(number, number + a)), [1 + (b + k) % LENGTH for k in range(a)]
            priorities, times = [float((c + 3 * k) % 7) for k in range(a)], [(c + k) % 5 for k in range(a)]
            keys = store.insert(content(numbers), lengths, priorities, times)
            assert sorted(model.allocate() for _ in numbers) == sorted(keys.indices)
            for at, *values in zip(keys.indices, numbers, lengths, priorities, times, strict=True):
                model.commit(at, *values)
            number += a
        elif kind == "reserve" and len(reserved) < 3:
            reserved.append((store.allocate(), model.allocate()))
        elif kind == "commit" and reserved:
            row, index = reserved.pop(a % len(reserved))
            for column, block in content([number]).items():
                row[column][:] = block[0]
            row.commit(1 + b % LENGTH, float(c), b)
            model.commit(index, number, 1 + b % LENGTH, float(c), b)
            number += 1
        elif kind == "cancel" and reserved:
            row, index = reserved.pop(a % len(reserved))
            row.cancel()
            model.free(index, FREE)
        elif kind in ("delete", "update") and model.committed():
            index = model.committed()[a % len(model.committed())]
            generation = model.rows[index]["generation"] - (b % 2)  # of the row, or of the one before it
            keys = Keys(np.array([index]), np.array([generation], np.uint64))
            done = store.delete(keys) if kind == "delete" else store.update_priorities(keys, c)
            assert done == 1 - b % 2
            if done and kind == "delete":
                model.free(index, DELETED)
            elif done:
                model.rows[index]["priority"] = float(c)
        check(store, model)
    for row, _ in reserved:
        row.cancel()


def test_random_removal_is_uniform_and_repeatable():
    def survivors(seed):
        store = ReplayStore.create(SCHEMA, 4, removal="random", seed=seed)
        store.insert(content(range(4)))
        return [store.insert(content([k])).indices[0] for k in range(2000)]

    counts = np.bincount(survivors(1), minlength=4)
    assert (abs(counts - 500) < 5 * np.sqrt(375)).all()
    assert survivors(1) == survivors(1) != survivors(2)


def test_a_function_of_the_status_table_chooses_who_goes():
    def longest(status):
        return status["index"][np.argmax(np.where(status["state"] == COMMITTED, status["length"], 0))]

    store = ReplayStore.create(SCHEMA, 3, removal=longest)
    store.insert(content(range(3)), lengths=[2, 8, 5])
    assert store.insert(content([3]), lengths=[1]).indices.tolist() == [1]
    assert store.insert(content([4]), lengths=[3]).indices.tolist() == [2]
    other = ReplayStore.attach(store.endpoint, removal=lambda status: [0, 1])
    assert other.insert(content([5])).indices.tolist() == [0]
    with pytest.raises(ReplayError, match=r"the removal function returned \[9\]"):
        ReplayStore.attach(store.endpoint, removal=lambda status: 9).insert(content([6, 7]))
    with pytest.raises(ReplayError, match="the store's removal is user"):
        ReplayStore.attach(store.endpoint)


def test_many_rows_are_refused_before_anything_is_evicted():
    store = ReplayStore.create(SCHEMA, 4)
    store.insert(content(range(4)))
    with (
        store.allocate(),
        pytest.raises(ReplayBusyError, match="4 rows requested of 4, with 1 being written"),
    ):
        store.insert(content(range(4)))
    assert len(store) == 3
    rows = [store.allocate() for _ in range(4)]
    with pytest.raises(ReplayBusyError, match="with 4 being written"):
        store.allocate()
    for row in rows:
        row.cancel()


def test_a_deleted_row_is_readable_until_its_index_is_used_again():
    store = ReplayStore.create(SCHEMA, 2)
    keys = store.insert(content([1, 2]))
    store.delete(keys)
    selection = Selection(keys, np.zeros(2, np.int64), np.ones(2), np.ones(2, np.float32))
    wanted = [Subscription(column="obs")]
    assert gather(store, selection, wanted).current.all()
    store.insert(content([3]))
    found = gather(store, selection, wanted)
    assert found.current.tolist() == [False, True]
    assert found.values["obs"][1].tolist() == [200.0] * 3


@pytest.mark.parametrize("budget", [None, 40_000])
def test_rows_beyond_the_budget_are_spilled_and_read_back(tmp_path, budget):
    rng, rows = np.random.default_rng(0), 200
    store = ReplayStore.create(
        SCHEMA, rows, selectors=(SubSequences(1),), memory_bytes=budget, folder=tmp_path if budget else None
    )
    kept, lengths = {}, {}
    for number in range(500):
        length = int(rng.integers(1, 9))
        keys = store.insert(content([number]), [length])
        kept[int(keys.indices[0])] = number
        lengths[int(keys.indices[0])] = length
    status = store.status()
    keys = Keys(status["index"], status["generation"])
    last = Selection(keys, status["length"] - 1, np.ones(rows), np.ones(rows, np.float32))
    if budget:
        assert store.prefetch(keys) > rows / 2
        assert store.counters()["spilled"] >= store.prefetch(keys)
        assert os.fstat(store._descriptors[0]).st_size + os.fstat(store._descriptors[1]).st_size <= budget
    window = [Subscription(column="obs", length=2), Subscription(column="action")]
    found = gather(store, last, window)
    assert found.current.all()
    for index, number in kept.items():
        expected = 100 * number + lengths[index] - 1
        assert found.values["obs"][index, :, 0].tolist() == [expected, expected + 1]
        assert found.values["action"][index] == lengths[index] - 1
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_a_folder_is_mapped_and_leaves_nothing_there(tmp_path):
    store = ReplayStore.create(SCHEMA, 5, folder=tmp_path)
    store.insert(content([4]))
    assert ReplayStore.attach(store.endpoint).block("obs", 0)[3].tolist() == [403.0] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_store_of_another_user_is_said_to_be_so(monkeypatch):
    def denied(path, flags):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with ReplayStore.create(SCHEMA, 5) as store:
        endpoint = store.endpoint
        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(ReplayError, match=r"\(.*Permission denied\): is its process of another user\?$"):
            ReplayStore.attach(endpoint)


def test_other_processes_attach_by_endpoint_or_pickle():
    store = ReplayStore.create(SCHEMA, 5, selectors=SELECTORS)
    store.insert(content([4]))
    other = pickle.loads(pickle.dumps(store))
    assert (other.schema, other.specs, len(other)) == (store.schema, store.specs, 1)
    endpoint = store.endpoint
    store.close()
    store.close()
    with pytest.raises(ReplayError, match=r"no longer exists|cannot be opened"):
        ReplayStore.attach(endpoint)
    with pytest.raises(ReplayError, match="this replay store is closed"):
        store.insert(content([1]))
    assert len(ReplayStore.attach(other.endpoint)) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"capacity": 900', b'"capacity": 400'),  # another layout than the file's
        (b'"capacity": 900', b'"capacity": 999'),
        (b'"capacity": 900', b'"capacity": 0.5'),
        (b'"capacity": 900', b'"capacity": 000'),  # no JSON
        (b'"slots": 900', b'"slots": 901'),  # more blocks than the second file has
        (b'"slots"', b'"sloth"'),
        (b'"<f4"', b'"|O8"'),
    ],
)
def test_a_damaged_description_is_refused(old, new):
    with ReplayStore.create(SCHEMA, 900) as store:
        control = bytes(store._control)
        assert control.count(old) == 1
        copies = [os.memfd_create("status"), os.dup(store._descriptors[1])]
        os.write(copies[0], control.replace(old, new))
        with pytest.raises(ReplayError, match="is not a replay store of this version of rayagi"):
            ReplayStore.attach("|".join(map(memory.endpoint, copies)))
    for copy in copies:
        os.close(copy)


def test_a_store_with_an_older_layout_is_refused():
    with ReplayStore.create(SCHEMA, 4) as store:
        assert bytes(store._control[:8]) == b"AREPLY03"
        store._control[:8] = b"AREPLY02"
        with pytest.raises(ReplayError, match="is not a replay store of this version of rayagi"):
            ReplayStore.attach(store.endpoint)


def test_a_damaged_length_of_the_description_is_refused():
    with ReplayStore.create(SCHEMA, 4) as store:
        store._control[3584:3592] = b"\xff" * 8
        with pytest.raises(ReplayError, match="is not a replay store of this version of rayagi"):
            ReplayStore.attach(store.endpoint)


class Watched:
    """A library whose functions check that the arrays whose addresses were taken for a call still exist in it."""

    def __init__(self, library, taken):
        self.library, self.taken, self.called = library, taken, set()

    def __getattr__(self, name):
        def call(*arguments):
            assert all(array() is not None for array in self.taken), name
            self.taken.clear()
            self.called.add(name.removeprefix("replay_"))
            return getattr(self.library, name)(*arguments)

        return call


def test_arrays_exist_while_the_kernel_has_their_addresses(monkeypatch):
    taken = []

    def watched_address(array):
        taken.append(weakref.ref(array))
        return kernel.address(array)

    monkeypatch.setattr(store_module, "address", watched_address)
    with ReplayStore.create(SCHEMA, 8, selectors=SELECTORS) as store:
        taken.clear()
        store._library = watched = Watched(store._library, taken)
        keys = store.insert(content([0, 1, 2, 3]), lengths=[LENGTH] * 4, priorities=2.0, timestamps=5)
        with store.allocate() as row:
            row.commit(3)
        with store.allocate():
            pass  # cancels
        store.update_priorities(keys, 3.0)
        store.mark(keys)
        store.prefetch(keys)
        store.edges(0)
        store.leaves(0)
        store.status()
        store.metrics()
        store.pack(keys, np.full(4, LENGTH), np.empty(4 * SCHEMA.row_bytes, np.uint8))
        store.thaw(store.freeze())
        store.delete(Keys(keys.indices[:1], keys.generations[:1]))
        expected = "insert allocate commit cancel update mark prefetch edges leaves snapshot times_sampled"
        assert watched.called == {*expected.split(), "pack", "freeze", "thaw", "delete"}


def test_single_transitions_need_no_time_axis():
    schema = ReplaySchema((Column(name="x", dtype="float64", shape=(2,)), Column(name="y", dtype="uint8")))
    store = ReplayStore.create(schema, 4)
    keys = store.insert({"x": np.array([[1.0, 2.0], [3.0, 4.0]]), "y": np.array([5, 6], np.uint8)})
    assert store.block("x", keys.indices[1]).tolist() == [[3.0, 4.0]]
    assert store.block("y", keys.indices[1]).tolist() == [6]
    assert len(store.insert({"x": np.empty((0, 2)), "y": np.empty(0, np.uint8)}).indices) == 0


def column_of(dtype):
    """Three rows of a type, with its extremes, and a store with a column of it."""
    kind = np.dtype(dtype)
    info = {"f": np.finfo, "b": None}.get(kind.kind, np.iinfo)
    values = [False, True, True] if info is None else [info(kind).min, 1, info(kind).max]
    return np.array(values, kind), ReplayStore.create(ReplaySchema((Column(name="x", dtype=kind),)), 4)


@pytest.mark.parametrize("dtype", ["?", *"bhilqBHILQ", "e", "f", "d"])
def test_single_steps_of_every_type_are_stored_as_they_are(dtype):
    rows, store = column_of(dtype)
    keys = store.insert({"x": rows})
    assert [store.block("x", index)[0] for index in keys.indices] == rows.tolist()


FORMS = {
    "as expected": lambda x: x,
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "every second": lambda x: np.repeat(x, 2, axis=0)[::2],
    "in columns": np.asfortranarray,
    "unaligned": lambda x: np.frombuffer(b"1" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "a list": lambda x: list(x),
    "a memoryview": memoryview,
    "a tensor": lambda x: torch.from_numpy(x.copy()),
    "masked": np.ma.asarray,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 3])
def test_single_steps_may_be_in_any_memory(form, count):
    schema = ReplaySchema((Column(name="x", dtype="float32", shape=(2, 3)), Column(name="y", dtype="int64")))
    store = ReplayStore.create(schema, 4)
    x = np.arange(6 * count, dtype=np.float32).reshape(count, 2, 3)
    y = np.arange(count) + 7
    keys = store.insert({"x": FORMS[form](x), "y": FORMS[form](y)})
    assert [store.block("x", index)[0].tolist() for index in keys.indices] == x.tolist()
    assert [store.block("y", index)[0] for index in keys.indices] == y.tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": np.zeros((1, 3), "f"), "y": np.zeros(2, "i8")}, r"y has shape \[2\]; expected 1 row"),
        ({"x": np.zeros((2, 4), "f"), "y": np.zeros(2, "i8")}, r"x has shape \[2, 4\]"),
        ({"x": np.zeros((2, 3), ">f4"), "y": np.zeros(2, "i8")}, r"x is >f4\[2, 3\] where float32"),
        ({"x": np.zeros((2, 3), "f"), "y": np.zeros(2, "f")}, r"y is float32\[2\] where int64"),
        ({"x": np.zeros((2, 3), "f"), "y": np.zeros((), "i8")}, r"y has shape \[\]"),
        ({"x": np.zeros((2, 3), "f"), "y": np.zeros(2, "M8[s]")}, r"y is datetime64\[s\]\[2\] where int64"),
        ({"x": np.zeros((2, 3), "f"), "y": np.array([None, None])}, r"y is object\[2\]"),
        ({"x": np.zeros((2, 3), "f"), "y": [1, 2], "z": [3, 4]}, r"\['x', 'y', 'z'\] were given"),
        ({"x": np.zeros((2, 3), "f"), "z": [3, 4]}, "no column 'z'"),
        ({"x": 1.0, "y": 2}, r"x has shape \[\]"),
    ],
)
def test_single_steps_that_do_not_fit_are_explained_and_leave_nothing(rows, message):
    schema = ReplaySchema((Column(name="x", dtype="float32", shape=(3,)), Column(name="y", dtype="int64")))
    store = ReplayStore.create(schema, 4)
    with pytest.raises(ReplayError, match=message):
        store.insert(rows)
    assert (len(store), store.metrics().inserts) == (0, 0)


def test_memory_of_what_was_inserted_is_free_again():
    store = ReplayStore.create(ReplaySchema((Column(name="x", dtype="uint8"),)), 8)
    memory = bytearray(b"abc")
    store.insert({"x": memory})
    with pytest.raises(ReplayError):
        store.insert({"x": np.frombuffer(memory, "S1")})
    memory.extend(b"def")  # refused while somebody has its address
    assert [store.block("x", index)[0] for index in store.insert({"x": memory}).indices] == [*b"abcdef"]


def changed(**columns):
    return {**content([0]), **columns}


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda s: s.insert(changed(obs=np.zeros((1, 9, 3)))),
            r"obs is float64\[1, 9, 3\] where float32",
        ),
        (
            lambda s: s.insert(changed(action=np.zeros((2, 8), "int16"))),
            r"action has shape \[2, 8\]; expected 1 row of 1 to 8 steps",
        ),
        (lambda s: s.insert(changed(obs=np.zeros((1, 12, 3), "float32"))), r"obs has shape \[1, 12, 3\]"),
        (lambda s: s.insert(changed(obs=np.zeros(3, "float32"))), r"obs has shape \[3\]"),
        (lambda s: s.insert({"obs": [[1, 2], [3]], "done": 1, "action": 2}), "inhomogeneous"),
        (lambda s: s.insert({"obs": 1}), r"columns \['obs'\] were given where \['action', 'done', 'obs'\]"),
        (lambda s: s.insert({**content([0]), "reward": 3}), "columns .* were given where"),
        (
            lambda s: s.insert({"obs": content([0])["obs"], "done": 2, "reward": 3}),
            "this store has no column 'reward'",
        ),
        (lambda s: s.insert(content([0]), [9]), r"lengths are \[9\]: give 1 of 1 to 8"),
        (lambda s: s.insert(content([0]), [0]), "give 1 of 1 to 8"),
        (
            lambda s: s.insert(content([0]), priorities=[-1.0]),
            r"priorities are \[-1.0\]: use finite ones, at least 0",
        ),
        (lambda s: s.insert(content([0]), priorities=np.nan), "use finite ones"),
        (lambda s: s.insert(content([0]), priorities=[1.0, 2.0]), "give one, or 1"),
        (lambda s: s.insert(content([0]), timestamps=[-1]), r"timestamps are \[-1\]"),
        (lambda s: s.insert(content([0]), timestamps=[1, 2]), "give one, or 1"),
        (lambda s: s.insert(content([0]), timestamps=np.nan), r"timestamps are \[nan\]: use whole numbers"),
        (lambda s: s.insert(content([0]), [2.5]), r"lengths are \[2.5\]: use whole numbers"),
        (lambda s: s.insert(content([0]), ["many"]), r"lengths are \['many'\]: use whole numbers"),
        (lambda s: s.insert(content([0]), [2**70]), "use whole numbers"),
        (
            lambda s: s.delete(Keys(np.array([4]), np.array([1], np.uint64))),
            "an index is not of this shard, which has 0 to 3",
        ),
        (
            lambda s: s.delete(Keys(np.array([0]), np.array([], np.uint64))),
            r"keys have indices \[1\] and generations \[0\]",
        ),
        (lambda s: s.allocate().commit(9), "lengths are"),
        (lambda s: s.commit(0, 1, 1.0, None), "only the process that allocated a row commits"),
        (lambda s: s.allocate()["reward"], "this store has no column 'reward'"),
        (lambda s: ReplayStore.create(SCHEMA, 0), "capacity is 0"),
        (lambda s: ReplayStore.create(SCHEMA, 2.5), "capacity is 2.5"),
        (lambda s: s.update_priorities(s.insert(content([0])), 10**400), "priorities are"),
        (lambda s: WithoutReplacement(-1.0), "exponent -1.0: use a finite number"),
        (lambda s: WithoutReplacement(float("nan")), "exponent nan: use a finite number"),
        (lambda s: ReplayStore.create(SCHEMA, 4, shard=2, num_shards=2), "shard 2 of 2"),
        (lambda s: ReplayStore.create(SCHEMA, 4, num_shards=2**38), "use at most 549755813888 rows together"),
        (
            lambda s: ReplayStore.create(SCHEMA, 4, removal="newest"),
            "removal 'newest' is not known: use fifo, lifo",
        ),
        (lambda s: ReplayStore.create(SCHEMA, 4, removal="user"), "removal 'user' is not known"),
        (lambda s: ReplayStore.create(SCHEMA, 4, removal=None), "removal None is not known: use fifo, lifo"),
        (lambda s: ReplayStore.create(SCHEMA, 4, max_times_sampled=-1), "max_times_sampled is -1"),
        (
            lambda s: ReplayStore.create(SCHEMA, 10**6, memory_bytes=10**6),
            "memory_bytes is 1,000,000 where this table needs",
        ),
        (lambda s: ReplayStore.create(SCHEMA, 2**31 - 1), "MiB in memory"),
        (lambda s: ReplayStore.create(SCHEMA, 4, folder="/does/not/exist"), "MiB in /does/not/exist"),
        (lambda s: ReplayStore.attach("/proc/1/fd/99999#5"), "cannot be opened"),
        (lambda s: ReplayStore.attach("nonsense"), "cannot be opened"),
        (lambda s: Column(name="a", dtype="complex128"), "column 'a' has type complex128"),
        (lambda s: Column(name="a", dtype="object"), "column 'a' has type object"),
        (lambda s: Column(name="a", dtype="float32", shape=(0,)), r"column 'a' has shape \(0,\)"),
        (lambda s: ReplaySchema(()), "at least one is needed"),
        (lambda s: ReplaySchema(SCHEMA.columns, 0), "max_length is 0"),
    ],
)
def test_bad_input_is_explained_in_one_sentence(act, message):
    store = ReplayStore.create(SCHEMA, 4)
    with pytest.raises(ReplayError, match=message) as raised:
        act(store)
    assert "\n" not in str(raised.value)


def test_a_lock_that_another_process_holds_is_awaited_once(monkeypatch):
    """Rows of single timesteps are inserted by a faster call, which the general one followed after its 10 s."""
    store = ReplayStore.create(ReplaySchema((Column(name="x", dtype="float32"),)), 2)
    calls = []
    monkeypatch.setattr(store, "_insert_arrays", lambda *given: calls.append(given) or kernel.LOCK_TIMEOUT)
    with pytest.raises(ReplayBusyError, match="has held the store's lock"):
        store.insert({"x": np.zeros(1, "float32")})
    assert len(calls) == 1


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    from actors.replay import kernel

    kernel.library.cache_clear()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        ReplayError, match=r"replay stores need a C compiler: no C compiler .* install one or set CC"
    ):
        ReplayStore.create(SCHEMA, 4)


def test_a_store_that_nothing_refers_to_has_no_scratch_memory():
    store = ReplayStore.create(SCHEMA, 4)
    store.insert(content([0, 1]))
    native = store._native
    assert native.scratch
    del store
    gc.collect()
    assert not native.scratch


def test_a_store_that_nothing_refers_to_has_no_descriptors():
    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(3):
        ReplayStore.create(SCHEMA, 4, selectors=SELECTORS)
    assert descriptors() == before


def test_a_living_writer_keeps_its_row_where_no_descriptor_is_free():
    """Without one, /proc cannot say who is alive: a row taken from a living writer would be written by two processes."""
    store = ReplayStore.create(SCHEMA, 2)
    row = store.allocate()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        reclaimed = store.reclaim()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reclaimed == 0
    row.commit(1)
    assert len(store) == 1


def test_the_oldest_row_is_found_by_its_nanoseconds():
    """Above 2^53 neighbouring timestamps are one float64."""
    store = ReplayStore.create(ReplaySchema((Column(name="x", dtype=np.float32),)), 2, removal="oldest")
    store.insert({"x": np.array([1, 2], np.float32)}, timestamps=np.array([2**60 + 1, 2**60]))
    store.insert({"x": np.array([3], np.float32)}, timestamps=np.array([2**60 + 2]))
    assert sorted(store.status()["timestamp"].tolist()) == [2**60 + 1, 2**60 + 2]
    store.close()
