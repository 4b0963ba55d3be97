"""The rate limit of a table of several shards: by hand, against a model, and with shards that nobody draws from."""

import threading
from contextlib import ExitStack

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay_processes import LIMIT_S
from replay_tables import SCHEMA, content

from actors.replay import (
    Prioritized,
    RateLimit,
    RateLimitedError,
    ReplayError,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    ReplayTimeoutError,
    Uniform,
    select,
    select_centralised,
)
from actors.replay.kernel import INSERT
from actors.replay.table import LocalShards
from actors.replay.table_limit import ShardError, admits_sample, balanced, shifts_of

AT_ONCE_S = 1e-9


def stores_of(num_shards, capacity=20, selectors=(), **limit):
    return [
        ReplayStore.create(
            SCHEMA, capacity, shard=k, num_shards=num_shards, selectors=selectors, limit=RateLimit(**limit)
        )
        for k in range(num_shards)
    ]


def insert(store, rows=1):
    return store.insert(content(range(rows)))


def errors(stores):
    return [store.limiter.status().error for store in stores]


@pytest.mark.parametrize("choose", [select, select_centralised])
def test_the_rule_by_hand(choose):
    """Two shards with two samples per insert, two rows first, error buffer 1: that of the table is 2."""
    stores = stores_of(2, samples_per_insert=2.0, min_size=2, error_buffer=1.0, timeout_s=AT_ONCE_S)
    with pytest.raises(
        ReplayTimeoutError,
        match=r"drawing 1 row .* of 2 shards: the table has no rows, and its limits need 2 more",
    ):
        choose(stores, Uniform(), 1, seed=0, draw=0)
    insert(stores[0], 3)  # one more than min_size: error 2, and the next insertion would wait
    assert not stores[0].limiter.admits(INSERT)
    choose(stores, Uniform(), 1, seed=0, draw=0)
    # Before the draw, of shard 0, both got the mean of 2 and 0: what is missing to min_size is no error.
    assert errors(stores) == [2 - 1 - 1, -2 * 2 + 1]
    insert(stores[0])  # 2
    choose(
        stores, Uniform(), 4, seed=0, draw=1
    )  # errors 2 and 1: the mean, 1.5, admits no insertion; nothing is moved
    assert errors(stores) == [2 - 4, -2 * 2 + 1]
    choose(stores, Uniform(), 1, seed=0, draw=2)  # -2 + 1 > -2
    with pytest.raises(ReplayTimeoutError, match="the sum of their errors is -2"):
        choose(stores, Uniform(), 1, seed=0, draw=3)
    insert(stores[1])  # below its min_size: counts for no error
    insert(stores[0])
    choose(stores, Uniform(), 1, seed=0, draw=3)


shares = st.builds(
    ShardError,
    rows=st.integers(0, 9),
    min_size=st.integers(1, 9),
    below=st.sampled_from([0.0, 2.0, 1e9]),
    above=st.sampled_from([0.0, 2.0, 1e9]),
    timeout_s=st.just(1.0),
    error=st.one_of(st.integers(-20, 20).map(float), st.sampled_from([-1e12, 1e12, 1e-40])),
)


@given(st.lists(shares, min_size=1, max_size=5))
@example(  # the second shard refuses rows, though the table has fewer than the first one's min_size
    [ShardError(0, 2, 0.0, 0.0, 1.0, 0.0), ShardError(1, 1, 0.0, 0.0, 1.0, 1.0)]
)
def test_one_side_is_always_admitted_and_no_error_is_lost(found):
    shifts = shifts_of(dict(enumerate(found)))
    after = [each._replace(error=each.error + shifts.get(k, 0.0)) for k, each in enumerate(found)]
    assert admits_sample(after) or not any(each.refuses_inserts for each in after)
    assert sum(each.error for each in after) == pytest.approx(sum(each.error for each in found), abs=1e-3)


operations = st.lists(
    st.tuples(st.sampled_from(["insert", "sample"]), st.integers(0, 2), st.integers(1, 4)), max_size=25
)


@settings(max_examples=25, deadline=None)
@given(
    num_shards=st.integers(1, 3),
    steps=operations,
    ratio=st.sampled_from([0.5, 2.0]),
    min_size=st.integers(1, 3),
    buffer=st.sampled_from([0.0, 3.0]),
)
def test_samples_per_insert_hold_for_the_sum_over_shards(num_shards, steps, ratio, min_size, buffer):
    """Model: inserts of each shard beyond min_size, and samples of the table."""
    stores = stores_of(
        num_shards, samples_per_insert=ratio, min_size=min_size, error_buffer=buffer, timeout_s=AT_ONCE_S
    )
    rows, counted, samples = [0] * num_shards, [0] * num_shards, 0
    for draw, (kind, shard, amount) in enumerate(steps):
        shard %= num_shards
        error = ratio * sum(counted) - samples
        balanced(LocalShards(stores))
        if kind == "insert":
            admitted = rows[shard] < min_size or error <= num_shards * buffer
            assert stores[shard].limiter.admits(INSERT) or not admitted
            if stores[shard].limiter.admits(INSERT):
                insert(stores[shard], amount)
                counted[shard] += max(0, amount - max(0, min_size - rows[shard]))
                rows[shard] += amount
        elif sum(rows) >= min_size and error > -num_shards * buffer:
            select(stores, Uniform(), amount, seed=0, draw=draw)
            samples += amount
        else:
            with pytest.raises(ReplayTimeoutError):
                select(stores, Uniform(), amount, seed=0, draw=draw)


@pytest.mark.parametrize("hosts", [("here", "here"), ("here", "away"), ("away", "away")])
def test_a_writer_whose_rows_are_never_drawn_and_a_reader_that_draws_others_do_not_stop_each_other(hosts):
    """Judged by their shards, the writer would wait for draws from shard 0, and the reader for rows in shard 1."""
    selector = Prioritized()
    stores = stores_of(2, selectors=(selector,), samples_per_insert=1.0, error_buffer=2.0)
    stores[1].insert(content([7]), priorities=1.0)
    with ExitStack() as stack:
        shards = [
            stack.enter_context(ReplayShard(store, host_id=host))
            for store, host in zip(stores, hosts, strict=True)
        ]
        addresses = [shard.address for shard in shards]
        table, other = (stack.enter_context(ReplayShards(addresses, host_id="here")) for _ in range(2))

        def write():
            for number in range(30):
                other.insert(content([number]), priorities=0.0, shard=0)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        drawn = [select(table, selector, 1, seed=0, draw=draw).keys.indices[0] for draw in range(30)]
        writer.join(LIMIT_S)
        assert not writer.is_alive()
        assert set(drawn) == {20}


def test_a_reader_waits_for_shards_of_other_hosts_and_gives_up():
    stores = stores_of(2, samples_per_insert=1.0, timeout_s=AT_ONCE_S)
    with ExitStack() as stack:
        shards = [stack.enter_context(ReplayShard(store, host_id="away")) for store in stores]
        table = stack.enter_context(ReplayShards([shard.address for shard in shards], host_id="here"))
        assert table.is_limited
        with pytest.raises(ReplayTimeoutError, match="its limits need 1 more"):
            select(table, Uniform(), 1, seed=0, draw=0)
        table.insert(content([1, 2]), shard=0)
        select(table, Uniform(), 1, seed=0, draw=0)
        with pytest.raises(ReplayTimeoutError, match="the sum of their errors is 0"):
            select(table, Uniform(), 1, seed=0, draw=1)
        for store in stores:
            store.limiter.set(RateLimit(samples_per_insert=1.0))
        table.counters()  # any answer says that there is a limit still
        with pytest.raises(RateLimitedError, match="given up"):
            select(table, Uniform(), 1, seed=0, draw=1, keep_waiting=lambda: False)
        for store in stores:
            store.limiter.set(None)
        table.counters()
        assert not table.is_limited
        select(table, Uniform(), 9, seed=0, draw=1)
        for wrong in (float("nan"), float("inf")):
            with pytest.raises(ReplayError, match="use a finite number"):
                table.ask("shift_error", {0: (wrong,)})


def test_a_reader_waits_for_an_empty_shard_of_this_host_whose_limit_came_later():
    store = ReplayStore.create(SCHEMA, 4)
    with ReplayShard(store) as shard, ReplayShards([shard.address]) as table:
        assert table.local == [0]
        store.limiter.set(RateLimit(timeout_s=AT_ONCE_S))
        with pytest.raises(ReplayTimeoutError, match="its limits need 1 more"):
            select(table, Uniform(), 1, seed=0, draw=0)


def test_a_remote_insertion_ends_with_the_limits_timeout(monkeypatch):
    monkeypatch.setattr("actors.replay.calls._PATIENCE_S", 0.0)
    (store,) = stores_of(1, samples_per_insert=1.0, timeout_s=0.2)
    insert(store, 2)
    with (
        ReplayShard(store, host_id="away") as shard,
        ReplayShards([shard.address], host_id="here") as table,
        pytest.raises(ReplayTimeoutError, match="inserting"),
    ):
        table.insert(content([7]))
