"""Batches on a device: each way against the CPU's gather, bit for bit, on torch's and Warp's CPU devices.

``check_...`` run on a GPU too (tests/gpu).
"""

import logging
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.replay import (
    Column,
    Gatherer,
    Keys,
    ReplayCheckpointer,
    ReplayError,
    ReplaySchema,
    ReplayStore,
    Subscription,
    SubSequences,
    gather,
    select,
)
from rayagi.device_replay import choice, mirror, zero_copy
from rayagi.device_replay.buffers import UnavailableError
from rayagi.device_replay.choice import WAYS, DeviceGatherer
from tests.unit.replay.replay_tables import SCHEMA, content, selection_of, shards_of, spilling

CPU = torch.device("cpu")
TYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "float16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "uint64",
    "float64",
)
LONGEST = 7


def assert_same(found, expected):
    """Every bit."""
    for kind in ("values", "masks"):
        own, other = getattr(found, kind), getattr(expected, kind)
        assert own.keys() == other.keys()
        for name, tensor in own.items():
            array = tensor.cpu().numpy()
            assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape)
            assert array.tobytes() == other[name].tobytes(), (kind, name)
    assert found.current.cpu().numpy().tolist() == expected.current.tolist()


def filled(columns, lengths, seed):
    """A full store of random bits: NaN with payloads, denormals, any bool that is one."""
    store = ReplayStore.create(ReplaySchema(columns, LONGEST), len(lengths))
    return store, overwrite(store, lengths, seed)


def overwrite(store, lengths, seed):
    rng, rows = np.random.default_rng(seed), {}
    for column in store.schema.columns:
        shape = (len(lengths), LONGEST + column.extra, *column.shape)
        if column.dtype == bool:
            rows[column.name] = rng.random(shape) < 0.5
        else:
            size = int(np.prod(shape)) * column.dtype.itemsize
            rows[column.name] = rng.integers(0, 256, size, np.uint8).view(column.dtype).reshape(shape)
    return store.insert(rows, lengths)


def check_any_windows(columns, wanted, lengths, n, seed, device):
    """All ways, twice; then with some rows overwritten, and then with the new ones among those that are selected."""
    store, keys = filled(columns, lengths, seed)
    ways = [way(store, wanted, n, device) for way in WAYS.values()]
    rng = np.random.default_rng(seed)

    def compare(keys, lengths):
        rows = rng.integers(0, len(lengths), n)
        steps = rng.integers(0, np.asarray(lengths)[rows])
        chosen = selection_of(Keys(keys.indices[rows], keys.generations[rows]), steps)
        for way in ways:
            assert_same(way(chosen), gather(store, chosen, wanted))

    compare(keys, lengths)
    compare(keys, lengths)
    others = lengths[: max(1, len(lengths) // 2)][::-1]
    new = overwrite(store, others, seed + 1)
    compare(keys, lengths)
    kept = slice(len(others), None)
    compare(
        Keys(*map(np.concatenate, zip(new, (k[kept] for k in keys), strict=True))), [*others, *lengths[kept]]
    )
    for way in ways:
        way.close()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_way_gives_the_windows_of_the_cpus_gather(data):
    columns = tuple(
        Column(
            name=f"c{k}",
            dtype=data.draw(st.sampled_from(TYPES)),
            shape=data.draw(st.sampled_from([(), (1,), (3,), (2, 2)])),
            extra=data.draw(st.integers(0, 2)),
        )
        for k in range(data.draw(st.integers(1, 3)))
    )
    wanted = [
        Subscription(
            column=data.draw(st.sampled_from(columns)).name,
            offset=data.draw(st.integers(-LONGEST - 3, LONGEST + 3)),
            length=data.draw(st.none() | st.integers(1, LONGEST + 4)),
            padding=data.draw(st.sampled_from(["in_place", "head", "tail"])),
            name=f"s{k}",
        )
        for k in range(data.draw(st.integers(1, 3)))
    ]
    lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=6))
    check_any_windows(
        columns, wanted, lengths, data.draw(st.integers(1, 9)), data.draw(st.integers(0, 99)), CPU
    )


WANTED = (Subscription(column="obs", length=2), Subscription(column="action"))


def check_rows_that_are_overwritten_during_the_copy(device):
    """The device's copy is between two looks at the tags: a row whose generation changes between them is not current."""
    store = ReplayStore.create(SCHEMA, 4)
    keys = store.insert(content([1, 2, 3, 4]))
    gatherer = WAYS["zero-copy"](store, WANTED, 4, device)
    copy, done = gatherer._copy, []

    def interrupted():
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if not done:
            done.append(store.insert(content([5])))  # fifo: in place of row 0
            done.append(store.allocate())  # row 1 is being written
            store.delete(Keys(keys.indices[2:3], keys.generations[2:3]))  # its blocks stay

    gatherer._copy = interrupted
    chosen = selection_of(keys, [0, 0, 0, 0])
    done.append(None)
    assert gatherer(chosen).current.all()  # the device has read these tags before
    done.clear()
    found = gatherer(chosen)
    assert found.current.tolist() == [False, False, True, True]
    assert found.values["obs"][:, 0, 0].tolist()[2:] == [300, 400]
    assert_same(gatherer(chosen), gather(store, chosen, WANTED))
    gatherer.close()


def test_rows_that_are_overwritten_during_the_copy_are_reported():
    check_rows_that_are_overwritten_during_the_copy(CPU)


def test_a_row_that_is_overwritten_on_its_way_into_the_mirror_is_reported_and_fetched_again(monkeypatch):
    store = ReplayStore.create(SCHEMA, 3)
    keys = store.insert(content([1, 2, 3]))
    gatherer, locate = WAYS["mirror"](store, WANTED, 3, CPU), mirror.locate
    gatherer(selection_of(keys, [0, 0, 0]))
    second = store.insert(content([4, 5, 6]))

    def interrupted(*arguments):
        found = locate(*arguments)
        store.insert(content([7]))
        return found

    monkeypatch.setattr(mirror, "locate", interrupted)
    found = gatherer(selection_of(second, [0, 0, 0]))
    assert found.current.tolist() == [False, True, True]
    assert found.values["obs"][:, 0, 0].tolist() == [0, 500, 600]
    monkeypatch.setattr(mirror, "locate", locate)
    third = Keys(second.indices, second.generations + np.array([1, 0, 0], np.uint64))
    found = gatherer(selection_of(third, [0, 0, 0]))
    assert found.current.all()
    assert found.values["obs"][:, 0, 0].tolist() == [700, 500, 600]


def test_a_row_crosses_once_into_the_mirror(monkeypatch):
    store = ReplayStore.create(SCHEMA, 8)
    keys, copied = store.insert(content(range(8))), []
    copy = Gatherer.copy
    monkeypatch.setattr(
        Gatherer, "copy", lambda self, *keys: copied.append(len(keys[0])) or copy(self, *keys)
    )
    gatherer = WAYS["mirror"](store, WANTED, 6, CPU)

    def batch_of(rows):
        found = gatherer(selection_of(Keys(keys.indices[rows], keys.generations[rows]), np.zeros(6)))
        assert found.values["obs"][:, 0, 0].tolist() == [100 * row for row in rows]

    for rows in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 0, 0, 0, 6, 6], [6, 7, 7, 7, 1, 2]):
        batch_of(rows)
    assert copied == [6, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_a_restored_store_is_read_anew(way, tmp_path):
    store = ReplayStore.create(SCHEMA, 2)
    store.insert(content([1, 2]))
    ReplayCheckpointer(store).save(tmp_path, {})
    gatherer = WAYS[way](store, WANTED, 2, CPU)
    chosen = selection_of(store.insert(content([3, 4])), [0, 0])
    assert gatherer(chosen).values["obs"][:, 0, 0].tolist() == [300, 400]
    ReplayCheckpointer(store).restore(tmp_path)
    again = store.insert(content([5, 6]))
    assert again.generations.tolist() == chosen.keys.generations.tolist()  # of other rows
    assert gatherer(chosen).values["obs"][:, 0, 0].tolist() == [500, 600]


def test_a_device_that_has_too_little_memory_is_a_reason(monkeypatch):
    def refuse(self, column):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(mirror.MirrorGatherer, "_allocate", refuse)
    with pytest.raises(UnavailableError, match=r"need 0 MiB of the device: tried to allocate"):
        WAYS["mirror"](ReplayStore.create(SCHEMA, 2), WANTED, 2, CPU)


def test_kernels_that_cannot_be_compiled_are_a_reason(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("rayagi.device_replay.window_launches.wp.launch", refuse)
    with pytest.raises(UnavailableError, match="Warp cannot compile or load its kernels: no compiler"):
        WAYS["zero-copy"](ReplayStore.create(SCHEMA, 2), WANTED, 2, CPU)


@pytest.mark.parametrize("way", WAYS)
def test_selections_that_are_wrong_are_explained(way):
    store = ReplayStore.create(SCHEMA, 2, shard=1, num_shards=2)
    keys = store.insert(content([1, 2]), [3, 8])
    gatherer = WAYS[way](store, WANTED, 2, CPU)
    with pytest.raises(ReplayError, match="row 2 has no timestep 3: its trajectory is shorter"):
        gatherer(selection_of(keys, [3, 0]))
    with pytest.raises(ReplayError, match="expected 2"):
        gatherer(selection_of(Keys(keys.indices[:1], keys.generations[:1]), [0]))
    with pytest.raises(ReplayError, match="an index is not of this shard, which has 2 to 3"):
        gatherer(selection_of(Keys(keys.indices - 1, keys.generations), [0, 0]))
    assert_same(gatherer(selection_of(keys, [2, 7])), gather(store, selection_of(keys, [2, 7]), WANTED))


@pytest.mark.parametrize("way", ["zero-copy", "mirror"])
def test_stores_that_a_device_cannot_read_are_refused_with_the_reason(way, tmp_path):
    with spilling(tmp_path, 8, 2) as store, pytest.raises(UnavailableError, match="spills rows to a file"):
        WAYS[way](store, WANTED, 2, CPU)
    with pytest.raises(UnavailableError, match="has several shards"):
        WAYS[way](shards_of(4, 2), WANTED, 2, CPU)


class Cudart:
    def __init__(self, status):
        self.status, self.calls = status, []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append(("register", address, size, flags))
        return self.status

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cudart(monkeypatch):
    fake = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.calls.append("synchronize"))
    return fake


def test_memory_is_page_locked_until_it_is_closed(cudart, monkeypatch):
    monkeypatch.setattr(zero_copy, "_device_address", lambda address: address + 1)
    store = ReplayStore.create(SCHEMA, 4)
    locked = zero_copy.PageLockedArray(store.slot_bytes)
    address = store.slot_bytes.ctypes.data
    assert locked.device_address == address + 1
    assert cudart.calls == [("register", address, 4 * SCHEMA.row_bytes, 3)]  # portable, mapped
    locked.close()
    locked.close()
    del locked
    assert cudart.calls[1:] == ["synchronize", ("unregister", address)]


def test_a_driver_that_does_not_page_lock_is_a_reason(cudart, monkeypatch):
    cudart.status = 2
    memory = np.zeros(2**20, np.uint8)
    with pytest.raises(
        UnavailableError, match=r"does not page-lock the store's 1 MiB \(error 2\): see ulimit -l"
    ):
        zero_copy.PageLockedArray(memory)
    assert len(cudart.calls) == 1  # nothing to release
    cudart.status = 0

    def refuse(address):
        raise UnavailableError("no access")

    monkeypatch.setattr(zero_copy, "_device_address", refuse)
    with pytest.raises(UnavailableError, match="no access"):
        zero_copy.PageLockedArray(memory)
    assert cudart.calls[-1] == ("unregister", memory.ctypes.data)


def chosen_way(caplog, store, n=3):
    caplog.set_level(logging.INFO, "rayagi.device_replay.choice")
    gatherer = DeviceGatherer(store, WANTED, n, CPU)
    chosen = select(store, SubSequences(1), n, seed=0, draw=0)
    before = store.counters()
    assert_same(gatherer(chosen), gather(store, chosen, WANTED))
    assert store.counters() == before  # measuring does not count as sampling
    gatherer.close()
    return gatherer.way


@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_way_is_used_and_all_are_logged(fastest, monkeypatch, caplog):
    monkeypatch.setattr(
        choice, "measure", lambda ways, *_: {way: 1e-6 if way == fastest else 2e-6 for way in ways}
    )
    store = ReplayStore.create(SCHEMA, 20, selectors=(SubSequences(1),))
    store.insert(content(range(10)), np.arange(10) % 8 + 1)
    assert chosen_way(caplog, store) == fastest
    assert f"3 rows to cpu by {fastest}: " in caplog.text
    for way in WAYS:
        assert f"{way} takes {1 if way == fastest else 2} us" in caplog.text


def test_times_are_those_of_a_batch_in_turns():
    turns = []
    ways = {name: lambda selection, name=name: turns.append((name, selection)) for name in ("a", "b")}
    times = choice.measure(ways, ["first", "second"], CPU)
    assert times.keys() == {"a", "b"}
    assert all(0 <= seconds < 1 for seconds in times.values())
    assert turns == 6 * [("a", "first"), ("a", "second"), ("b", "first"), ("b", "second")]


def test_without_warp_the_reason_is_logged(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "warp", None)
    for name in ("mirror", "zero_copy", "window_launches", "windows_kernel"):
        monkeypatch.delitem(sys.modules, f"rayagi.device_replay.{name}", raising=False)
    store = ReplayStore.create(SCHEMA, 4, selectors=(SubSequences(1),))
    store.insert(content(range(4)))
    assert chosen_way(caplog, store) == "copy"
    for way in ("zero-copy", "mirror"):
        assert f"{way} is not available: Warp is not installed" in caplog.text
    assert "pip install 'rayagi[gpu]'" in caplog.text


def test_a_store_that_only_the_cpu_reads_is_copied(tmp_path, caplog):
    with spilling(tmp_path, 8, 2, selectors=(SubSequences(1),)) as store:
        store.insert(content([1, 2]))
        store.insert(content([3, 4]))
        caplog.set_level(logging.INFO, "rayagi.device_replay.choice")
        gatherer = DeviceGatherer(store, WANTED, 4, CPU)
        chosen = select(store, SubSequences(1), 4, seed=0, draw=0)
        assert_same(gatherer(chosen), gather(store, chosen, WANTED))
    assert gatherer.way == "copy"
    assert "mirror is not available: the store spills rows to a file" in caplog.text


def test_rows_that_are_gone_are_not_measured():
    store = ReplayStore.create(SCHEMA, 2)
    keys = store.insert(content([1, 2]))
    store.delete(keys)
    gatherer = DeviceGatherer(store, WANTED, 2, CPU)
    found = gatherer(selection_of(keys, [0, 0]))  # deleted rows stay readable
    assert (found.current.tolist(), gatherer.way) == ([True, True], "")
    keys = store.insert(content([3, 4]))
    assert gatherer(selection_of(keys, [0, 0])).values["obs"][:, 0, 0].tolist() == [300, 400]
    assert gatherer.way in WAYS
