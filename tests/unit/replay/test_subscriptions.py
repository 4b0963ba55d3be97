"""Windows against their definition: offsets, lengths, paddings, masks, extra steps; threads; the caller's own batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_tables import LENGTH, SCHEMA, content, selection_of

from actors.replay import (
    Column,
    Gatherer,
    Keys,
    ReplayError,
    ReplaySchema,
    ReplayStore,
    Subscription,
    SubSequences,
    gather,
    select,
)
from actors.replay.kernel import OUTSIDE, STALE, VALID
from actors.replay.subscriptions import worthwhile_threads


def expected_window(number, length, extra, t, offset, size, padding):
    """obs of the steps max(0, t + offset) to min(t + offset + size, length + extra), padded with zeros."""
    first = max(0, t + offset)
    held = list(range(first, max(first, min(t + offset + size, length + extra))))
    before = {"in_place": first - (t + offset) if held else 0, "head": size - len(held), "tail": 0}[padding]
    values = [0] * before + [100 * number + step for step in held]
    mask = [False] * before + [True] * len(held)
    return values + [0] * (size - len(values)), mask + [False] * (size - len(mask))


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, LENGTH), min_size=1, max_size=6),
    offset=st.integers(-9, 9),
    size=st.integers(1, 12),
    padding=st.sampled_from(["in_place", "head", "tail"]),
    data=st.data(),
)
def test_windows_are_those_of_the_definition(lengths, offset, size, padding, data):
    store = ReplayStore.create(SCHEMA, 6)
    keys = store.insert(content(np.arange(1, len(lengths) + 1)), lengths)
    steps = [data.draw(st.integers(0, length - 1)) for length in lengths]
    found = gather(
        store,
        selection_of(keys, steps),
        [
            Subscription(column="obs", offset=offset, length=size, padding=padding),
            Subscription(column="action", offset=offset, length=size, padding=padding),
        ],
    )
    for row, (length, step) in enumerate(zip(lengths, steps, strict=True)):
        values, mask = expected_window(row + 1, length, 1, step, offset, size, padding)
        assert found.values["obs"][row, :, 2].tolist() == values
        assert found.masks["obs"][row].tolist() == mask
        values, mask = expected_window(0, length, 0, step, offset, size, padding)
        assert found.values["action"][row].tolist() == values
        assert found.masks["action"][row].tolist() == mask


@pytest.mark.parametrize("spoiled", ["none", "overwritten", "outside"])
@pytest.mark.parametrize("width", [1, 4, 40])  # of a row of 20 bytes, which is fetched whole, to 1,160
@pytest.mark.parametrize("in_order", [True, False])
def test_a_batch_of_several_chunks_is_what_indexing_gives(width, in_order, spoiled):
    """100 rows: three chunks of 32 and one of 4. A row that is spoiled is in the second."""
    rng = np.random.default_rng(0)
    plain = rng.random((50, 7, width), np.float32)
    schema = ReplaySchema(
        (Column(name="x", dtype="float32", shape=(width,)), Column(name="i", dtype="int32")), 7
    )
    store = ReplayStore.create(schema, 50)
    keys = store.insert({"x": plain, "i": np.tile(np.arange(50, dtype=np.int32)[:, None], 7)})
    rows, steps = rng.integers(0, 50, 100), rng.integers(1, 6, 100)
    rows[rows == 11], rows[40] = 12, 11
    bad = 40 if spoiled != "none" else None
    if spoiled == "overwritten":
        store.delete(Keys(keys.indices[11:12], keys.generations[11:12]))
        store.insert({"x": np.ones((1, 7, width), np.float32), "i": np.full((1, 7), -1, np.int32)})
    if spoiled == "outside":
        steps[40] = 2**40
    windows = [
        Subscription(column="x", offset=-1, length=3),
        Subscription(column="i"),
        Subscription(column="x", name="now"),
    ]
    gatherer = Gatherer(store, windows, 100, threads=1)
    arguments = keys.indices[rows], keys.generations[rows], steps
    where = None if in_order else rng.permutation(100)
    valid = np.empty(100, np.uint8)
    count = store.gather(0, 100, gatherer._part_arguments, (*arguments, valid, where))
    good = np.arange(100) != bad
    assert count == 100 - good.sum()
    assert valid.tolist() == np.where(good, VALID, STALE if spoiled == "overwritten" else OUTSIDE).tolist()
    expected = np.stack([plain[rows, np.where(good, steps + shift, 0)] for shift in (-1, 0, 1)], axis=1)
    np.testing.assert_array_equal(gatherer.values["x"], np.where(good[:, None, None], expected, 0))
    np.testing.assert_array_equal(gatherer.values["now"], np.where(good[:, None], expected[:, 1], 0))
    np.testing.assert_array_equal(gatherer.values["i"], np.where(good, rows, 0))
    for mask in gatherer.masks.values():
        assert (mask.reshape(100, -1) == good[:, None]).all()


def test_a_transition_is_two_windows_of_one_column():
    store = ReplayStore.create(SCHEMA, 20, selectors=(SubSequences(1),))
    store.insert(content(range(20)), np.tile([3, 8], 10))
    chosen = select(store, SubSequences(1), 500, seed=0, draw=0)
    wanted = [Subscription(column="obs"), Subscription(column="obs", offset=1, name="next_obs")]
    found = gather(store, chosen, wanted)
    assert found.values["obs"].shape == (500, 3)
    np.testing.assert_array_equal(found.values["obs"][:, 0], 100 * chosen.keys.indices + chosen.steps)
    np.testing.assert_array_equal(found.values["next_obs"], found.values["obs"] + 1)
    assert found.masks["next_obs"].all()


@pytest.mark.parametrize("shape", [(3, 0), (3, 2), (2,), (4,)])
def test_steps_of_another_shape_are_refused(shape):
    with ReplayStore.create(SCHEMA, 4) as store:
        keys = store.insert(content([0, 1, 2]))
        gatherer = Gatherer(store, [Subscription(column="obs")], 3)
        with pytest.raises(ReplayError, match=r"steps \[.*\]"):
            gatherer.copy(*keys, np.zeros(shape, np.int64))
        with pytest.raises(ReplayError, match=r"steps \[.*\]"):
            store.examine(keys, np.zeros(shape, np.int64))
        assert gatherer.copy(*keys, np.array([2**63 - 1, -(2**63), 1])).tolist() == [2, 2, 1]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_batch(threads, monkeypatch):
    monkeypatch.setattr("actors.replay.subscriptions._BYTES_PER_START", 1)
    store = ReplayStore.create(SCHEMA, 20, selectors=(SubSequences(2),))
    store.insert(content(range(20)))
    chosen = select(store, SubSequences(2), 101, seed=0, draw=0)
    found = gather(store, chosen, [Subscription(column="obs", length=2)], threads=threads)
    expected = 100 * chosen.keys.indices[:, None] + chosen.steps[:, None] + np.arange(2)
    np.testing.assert_array_equal(found.values["obs"][:, :, 1], expected)


def test_the_callers_arrays_and_tensors_are_filled():
    store = ReplayStore.create(SCHEMA, 3, shard=1, num_shards=2)
    keys = store.insert(content([1, 2, 3]))
    assert keys.indices.tolist() == [3, 4, 5]
    out = {"obs": torch.full((3, 2, 3), -1.0), "action": np.full(3, -1, "int16")}
    wanted = [Subscription(column="obs", length=2), Subscription(column="action")]
    found = gather(store, selection_of(keys, [0, 7, 4]), wanted, out=out)
    assert found.values["obs"] is out["obs"]
    assert out["obs"][:, :, 0].tolist() == [[100, 101], [207, 208], [304, 305]]
    assert out["action"].tolist() == [0, 7, 4]


def test_overwritten_rows_are_reported_and_not_copied():
    store = ReplayStore.create(SCHEMA, 3)
    keys = store.insert(content([1, 2, 3]))
    store.insert(content([4]))
    found = gather(store, selection_of(keys, [1, 1, 1]), [Subscription(column="obs")])
    assert found.current.tolist() == [False, True, True]
    assert found.values["obs"][:, 0].tolist() == [0, 201, 301]
    with store.allocate():
        assert gather(store, selection_of(keys, [1, 1, 1]), [Subscription(column="obs")]).current.sum() == 1


@pytest.mark.parametrize(
    ("subscriptions", "options", "message"),
    [
        ([], {}, "at least one is needed"),
        ([Subscription(column="obs"), Subscription(column="obs")], {}, "each with a name of its own"),
        (
            [Subscription(column="reward")],
            {},
            "this store has no column 'reward': its columns are obs, action, done",
        ),
        ([Subscription(column="obs")], {"steps": 5}, "row 0 has no timestep 5: its trajectory is shorter"),
        ([Subscription(column="obs")], {"steps": -1}, "row 0 has no timestep -1"),
        (
            [Subscription(column="obs")],
            {"out": {"x": np.zeros(1)}},
            r"out has \['x'\], which no subscription fills",
        ),
        (
            [Subscription(column="obs")],
            {"out": {"obs": np.zeros((1, 3))}},
            r"float64\[1, 3\] where a contiguous, writable float32",
        ),
        (
            [Subscription(column="obs")],
            {"out": {"obs": [1, 2, 3]}},
            "is list: give an array, or a tensor on the CPU",
        ),
    ],
)
def test_bad_subscriptions_are_explained(subscriptions, options, message):
    store = ReplayStore.create(SCHEMA, 1)
    keys = store.insert(content([1]), [5])
    with pytest.raises(ReplayError, match=message):
        gather(store, selection_of(keys, [options.get("steps", 0)]), subscriptions, out=options.get("out"))


def test_windows_of_no_length_and_unknown_paddings_are_refused():
    with pytest.raises(ReplayError, match="length 0"):
        Subscription(column="obs", length=0)
    for wrong in ({"offset": 2**63 - 1, "length": 5}, {"offset": -(2**31)}, {"length": 2**31}):
        with pytest.raises(ReplayError, match=r"use numbers below 2\*\*31"):
            Subscription(column="obs", **wrong)
    with pytest.raises(ReplayError, match="padding 'left' is not known: use in_place, head, tail"):
        Subscription(column="obs", padding="left")
    with pytest.raises(ReplayError, match="an index is not of this shard, which has 0 to 0"):
        gather(
            ReplayStore.create(SCHEMA, 1),
            selection_of(Keys(np.array([1]), np.array([1], np.uint64)), [0]),
            [Subscription(column="obs")],
        )


@pytest.mark.parametrize(("size", "threads"), [(0, 1), (2**20 - 1, 1), (2**20, 2), (2**24, 8), (2**26, 16)])
def test_threads_are_started_as_far_as_they_shorten_the_copy(size, threads):
    """W d + size / (W r) is least for the root of size / (r d), with r d = 2**18 bytes."""
    assert worthwhile_threads(size) == threads
