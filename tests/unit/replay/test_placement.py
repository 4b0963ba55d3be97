"""Placement of rows: offline by priority, and moves to where they are read."""

import logging
from contextlib import ExitStack

import numpy as np
import pytest
from replay_tables import LENGTH, SCHEMA, SELECTORS, content

from actors.replay import (
    Keys,
    RateLimit,
    RateLimitedError,
    ReplayError,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    Selection,
    Subscription,
    Uniform,
    gather,
    select,
)
from actors.replay.kernel import COMMITTED
from actors.replay.placement import PlacementController, move_rows, place_offline

WHOLE = [Subscription(column="obs", length=LENGTH + 1), Subscription(column="action", length=LENGTH)]


@pytest.fixture
def table():
    """Shard 0 of this host, empty, and shard 1 of another with rows 0 to 9 of priorities 0 to 9; 10 each."""
    with ExitStack() as stack:
        stores = [
            ReplayStore.create(SCHEMA, 10, selectors=SELECTORS, shard=k, num_shards=2) for k in range(2)
        ]
        stores[1].insert(content(range(10)), 1 + np.arange(10) % LENGTH, np.arange(10.0), np.arange(10) + 70)
        shards = [
            stack.enter_context(ReplayShard(store, host_id=host))
            for store, host in zip(stores, ("here", "away"), strict=True)
        ]
        yield stack.enter_context(ReplayShards([shard.address for shard in shards], host_id="here"))


def test_offline_rows_of_the_highest_priorities_are_placed_beside_the_readers(caplog):
    # Sorted: 9, 8 | 7, 6 go to shards 2 and 0 in turn; the rest, 1, 1 and 0, to 1 and 3.
    caplog.set_level(logging.INFO)
    found = place_offline([1, 9, 6, 0, 8, 1, 7], capacity=2, num_shards=4, input_shards=[2, 0])
    assert found.shards.tolist() == [1, 2, 0, 1, 0, 3, 2]
    assert found.local_share == pytest.approx(30 / 32)  # (9 + 8 + 7 + 6) / (30 + 2)
    assert "4 of 7 rows, of the highest priorities, are placed in shards 2, 0 beside the stage" in caplog.text
    everywhere = place_offline([1.0] * 4, capacity=2, num_shards=2, input_shards=[0, 1], exponent=0.6)
    assert np.bincount(everywhere.shards).tolist() == [2, 2]
    assert everywhere.local_share == 1.0
    assert place_offline([0.0], capacity=2, num_shards=1, input_shards=[0]).local_share == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_shards": []}, "give shards from 0 to 1"),
        ({"input_shards": [2]}, "give shards from 0 to 1"),
        ({"input_shards": [0], "capacity": 2}, "5 rows for a table of 2 shards of 2"),
    ],
)
def test_placements_that_cannot_be_are_refused(options, message):
    with pytest.raises(ReplayError, match=message):
        place_offline(np.ones(5), **{"capacity": 5, "num_shards": 2, **options})


def test_priorities_of_any_size_are_placed():
    with pytest.raises(ReplayError, match=r"priorities are \[nan\]"):
        place_offline([1.0, np.nan], capacity=2, num_shards=1, input_shards=[0])
    huge = place_offline([1e300, 1e300, 1e300], capacity=2, num_shards=2, input_shards=[1], exponent=2.0)
    assert huge.local_share == pytest.approx(2 / 3)


def test_a_reader_that_moves_rows_does_not_wait_for_its_own_draws(monkeypatch):
    monkeypatch.setattr("actors.replay.calls._PATIENCE_S", 0.0)
    limit = RateLimit(samples_per_insert=1.0)
    with ExitStack() as stack:
        stores = [ReplayStore.create(SCHEMA, 10, shard=k, num_shards=2, limit=limit) for k in range(2)]
        for store in stores:
            store.insert(content(range(5)))  # error 4 in each: neither admits a row before 4 are drawn
        shards = [
            stack.enter_context(ReplayShard(store, host_id=host))
            for store, host in zip(stores, ("here", "away"), strict=True)
        ]
        table = stack.enter_context(ReplayShards([shard.address for shard in shards], host_id="here"))
        status = table.status()
        keys = Keys(status["index"][10:15], status["generation"][10:15])
        assert move_rows(table, keys, 0) == 0
        assert table.counters()["inserted"] == len(table) == 10
        with pytest.raises(RateLimitedError):
            table.insert(content([1]), shard=1, keep_waiting=lambda: False)


def test_nothing_is_moved_to_shards_that_are_lost_meanwhile(table, monkeypatch):
    for draw in range(20):
        gather(table, select(table, Uniform(), 64, seed=0, draw=draw), WHOLE)
    monkeypatch.setattr(table, "counters_by_shard", dict)
    (move,) = PlacementController(table).rebalance()
    assert (move.rows, "no shard of this host has a free row" in move.reason) == (0, True)


def test_moved_rows_are_the_same_rows_elsewhere(table):
    keys = Keys(np.array([17, 12, 13, 14]), np.array([1, 1, 9, 1], np.uint64))  # 13 has generation 1
    assert move_rows(table, keys, 0) == 3
    assert move_rows(table, keys, 0) == 0
    assert len(table) == 10
    status = table.status()
    held = status[status["state"] == COMMITTED]
    numbers = held["priority"].astype(int)  # row k has priority k
    assert numbers.tolist() == [7, 2, 4, 0, 1, 3, 5, 6, 8, 9]
    np.testing.assert_array_equal(held["length"], 1 + numbers % LENGTH)
    np.testing.assert_array_equal(held["timestamp"], 70 + numbers)
    n = len(held)
    everything = Selection(
        Keys(held["index"].copy(), held["generation"].copy()), np.zeros(n, int), np.ones(n), np.ones(n)
    )
    batch = gather(table, everything, WHOLE)
    for name, wanted in content(numbers).items():
        if name in batch.values:
            mask = batch.masks[name].reshape(batch.masks[name].shape + (1,) * (wanted.ndim - 2))
            np.testing.assert_array_equal(batch.values[name], wanted * mask)


def test_rows_are_moved_to_where_they_are_read(table, caplog):
    caplog.set_level(logging.INFO)
    controller = PlacementController(table, most_rows=4)
    for draw in range(20):
        gather(table, select(table, Uniform(), 64, seed=0, draw=draw), WHOLE)
    with ReplayShards(
        [member.remote.address for member in table._members.values()], host_id="third"
    ) as other:
        keys = select(other, Uniform(), 3000, seed=0, draw=0)
        gather(other, keys, WHOLE[:1])
    (move,) = controller.rebalance()
    assert move.rows == 0
    assert "a third host has read twice as many there" in move.reason
    for draw in range(20):
        gather(table, select(table, Uniform(), 64, seed=0, draw=draw), WHOLE)
    (move,) = controller.rebalance()
    assert (move.source, move.target, move.rows) == (1, 0, 4)
    assert move.reason in caplog.text
    assert "1280 of 1280 rows that this process read (100%) came from shard 1 on another host" in move.reason
    status = table.status()
    assert sorted(status["priority"][(status["state"] == COMMITTED) & (status["index"] < 10)]) == [6, 7, 8, 9]
    assert len(table) == 10
    assert controller.rebalance() == []  # nothing was read since

    table.insert(content(range(20, 26)), shard=0)  # shard 0 is full
    for draw in range(40):
        gather(table, select(table, Uniform(), 64, seed=0, draw=draw), WHOLE)
    (move,) = controller.rebalance()
    assert move.rows == 0
    assert "no shard of this host has a free row" in move.reason
    assert len(table) == 16
