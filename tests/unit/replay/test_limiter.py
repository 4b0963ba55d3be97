"""The rate limiter: its rule against a model, waiting processes that are woken, killed and suspended, restored limits."""

import json
import math
import os
import pickle
import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_processes import LIMIT_S, forked, kill
from replay_tables import SCHEMA, content

from actors.replay import (
    BatchStream,
    Keys,
    RateLimit,
    RateLimitedError,
    ReplayCheckpointer,
    ReplayError,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    ReplayTimeoutError,
    Subscription,
    Uniform,
    select,
)
from actors.replay.kernel import COMMITTED, INSERT, SAMPLE
from actors.replay.limiter import WaitingRequest
from placement.errors import counted
from tests.waiting import until

AT_ONCE_S = 1e-9
"""Timeout of requests that must not wait."""


def store_of(capacity=20, **limit):
    return ReplayStore.create(SCHEMA, capacity, limit=RateLimit(**limit))


def insert(store, rows=1):
    return store.insert(content(range(rows)))


def sample(store, rows=1, draw=0):
    return select(store, Uniform(), rows, seed=0, draw=draw)


def test_the_rule_by_hand():
    """Two samples per insert, three rows first, error buffer 4."""
    store = store_of(samples_per_insert=2.0, min_size=3, error_buffer=4.0, timeout_s=AT_ONCE_S)
    insert(store, 2)
    with pytest.raises(
        ReplayTimeoutError,
        match=r"drawing 1 row has waited .* the store has 2 rows, and its limit needs 1 more",
    ):
        sample(store)
    insert(store)  # the third row: error 0
    assert store.limiter.status().error == 0.0
    insert(store, 2)  # error 2 * 2 = 4, which is not above the buffer
    insert(store)  # error 6
    with pytest.raises(ReplayTimeoutError, match=r"the error is 6 after 3 inserts and no samples"):
        insert(store)
    sample(store, 9)  # error -3
    sample(store)  # error -4
    with pytest.raises(ReplayTimeoutError, match=r"it goes on when rows are inserted"):
        sample(store)
    status = store.limiter.status()
    assert (status.inserts, status.samples, status.error) == (3, 10, -4.0)
    assert (status.admits_insert, status.admits_sample, status.waiting) == (True, False, ())
    assert status.waits == {"insert": 1, "sample": 2}


operations = st.lists(
    st.tuples(st.sampled_from(["insert", "sample", "delete", "set", "restore"]), st.integers(1, 6)),
    max_size=40,
)
ratios = st.one_of(st.none(), st.sampled_from([0.1, 0.5, 1.0, 3.0, 1e9]))
buffers = st.one_of(
    st.sampled_from([0.0, 0.5, 7.0, math.inf]), st.tuples(*[st.sampled_from([0.0, 2.0, math.inf])] * 2)
)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), steps=operations)
def test_one_side_is_always_admitted_and_counts_are_the_models(data, steps):
    """Model: inserts, samples and offset in plain Python."""
    limits = st.builds(
        RateLimit,
        samples_per_insert=ratios,
        min_size=st.integers(1, 8),
        error_buffer=buffers,
        timeout_s=st.just(AT_ONCE_S),
    )
    limit = data.draw(limits)
    store = ReplayStore.create(SCHEMA, 8, limit=limit)
    rows, inserts, samples, offset = 0, -limit.min_size, 0, 0.0

    def error():
        return (limit.samples_per_insert or 0.0) * inserts - samples + offset

    for draw, (kind, amount) in enumerate(steps):
        below, above = (
            limit.error_buffer if isinstance(limit.error_buffer, tuple) else (limit.error_buffer,) * 2
        )
        free = limit.samples_per_insert is None
        admits = {
            "insert": rows < limit.min_size or free or error() <= above,
            "sample": rows >= limit.min_size and (free or error() > -below),
        }
        status = store.limiter.status()
        assert (status.inserts, status.samples) == (inserts, samples)
        assert status.error == error()
        assert {"insert": status.admits_insert, "sample": status.admits_sample} == admits
        assert any(admits.values())
        if kind in admits and not admits[kind]:
            with pytest.raises(ReplayTimeoutError):
                (insert if kind == "insert" else sample)(store, amount)
        elif kind == "insert":
            insert(store, amount)
            rows, inserts = min(8, rows + amount), inserts + amount
        elif kind == "sample":
            sample(store, amount, draw)
            samples += amount
        elif kind == "delete" and rows:
            status = store.status()
            first = status[status["state"] == COMMITTED][:1]
            rows -= store.delete(Keys(first["index"], first["generation"]))
        elif kind == "set":
            # Rows that are missing to min_size are no error to be carried over.
            before = error() - (limit.samples_per_insert or 0.0) * min(0, inserts)
            limit = data.draw(limits)
            below, above = (
                limit.error_buffer if isinstance(limit.error_buffer, tuple) else (limit.error_buffer,) * 2
            )
            if limit.samples_per_insert is None:
                below = above = math.inf
            store.limiter.set(limit)
            inserts, samples, offset = min(0, rows - limit.min_size), 0, min(max(before, -below), above)
        elif kind == "restore":
            store.limiter.restore(json.loads(json.dumps(store.limiter.state())))


def test_without_a_limit_nobody_waits():
    store = ReplayStore.create(SCHEMA, 4)
    insert(store, 3)
    sample(store, 100)
    status = store.limiter.status()
    assert (status.limit, status.error, store.limiter.state()) == (None, 0.0, None)
    assert (status.admits_insert, status.admits_sample) == (True, True)


def test_all_processes_see_who_waits_for_what_and_a_draw_wakes_the_writer():
    store = store_of(samples_per_insert=1.0, min_size=2)
    insert(store, 3)  # error 1: above the buffer

    def write(pipe):
        insert(store, 2)
        os.write(pipe, b"x")

    writer, pipe = forked(write)
    (waiting,) = until(lambda: ReplayStore.attach(store.endpoint).limiter.status().waiting)
    assert waiting == WaitingRequest(writer, "insert", 2, waiting.waited_s)
    sample(store)
    assert os.read(pipe, 1) == b"x"
    os.waitpid(writer, 0)
    os.close(pipe)
    status = store.limiter.status()
    assert (status.waiting, status.waits["insert"], len(store)) == ((), 1, 5)
    assert status.waited_s["insert"] > 0


@pytest.mark.parametrize("change", [RateLimit(samples_per_insert=5.0, error_buffer=100.0), None], ids=str)
def test_a_changed_limit_wakes_who_waits(change):
    store = store_of(samples_per_insert=1.0, error_buffer=0.0)
    insert(store)

    def draw(pipe):
        sample(store)
        os.write(pipe, b"x")

    sampler, pipe = forked(draw)
    until(lambda: store.limiter.status().waiting)
    store.limiter.set(change)
    assert os.read(pipe, 1) == b"x"
    os.waitpid(sampler, 0)
    os.close(pipe)


def test_a_changed_ratio_does_not_judge_the_past():
    """Under 1 sample per insert, 1000 samples after 10 inserts would block sampling for 990 inserts."""
    store = store_of(samples_per_insert=100.0, min_size=1, error_buffer=1000.0, timeout_s=AT_ONCE_S)
    insert(store, 11)
    sample(store, 1000)
    store.limiter.set(RateLimit(samples_per_insert=1.0, error_buffer=2.0, timeout_s=AT_ONCE_S))
    assert store.limiter.status().error == 0.0
    sample(store, 2)
    insert(store)
    sample(store)
    store.limiter.set(RateLimit(samples_per_insert=1.0, min_size=20, timeout_s=AT_ONCE_S))
    insert(store, 8)  # the 20 rows of min_size are there; the error of -2 is clipped to the new buffer of 0
    assert (len(store), store.limiter.status().error, store.limiter.status().admits_insert) == (20, 0.0, True)


def test_killed_waiters_leave_nothing():
    store = store_of(samples_per_insert=1.0)
    insert(store, 2)
    for attempt in range(3):
        writers = [forked(lambda _: insert(store))[0] for _ in range(2)]
        waiting = until(lambda: len(found := store.limiter.status().waiting) == 2 and found)
        assert {each.pid for each in waiting} == set(writers)
        for writer in writers:
            kill(writer)
        assert store.limiter.status().waiting == ()
        assert (len(store), store.counters()["writing"]) == (2 + attempt, 0)
        sample(store, 1, attempt)
        insert(store)


def test_more_processes_wait_than_are_named():
    store = store_of(samples_per_insert=1.0, error_buffer=1.0, timeout_s=math.inf)
    insert(store, 3)
    limiter = store.limiter
    places = [limiter.begin(INSERT, 1) for _ in range(33)]
    assert (places[:32], places[32]) == (list(range(32)), -1)
    assert len(limiter.status().waiting) == 32
    for place in places:
        limiter.end(INSERT, place, 0.0)
    assert limiter.status().waiting == ()


def test_a_suspended_sampler_stops_the_writer_visibly_and_no_longer_than_it_is_suspended():
    store = store_of(samples_per_insert=1.0, error_buffer=3.0)

    def draw(_):
        for number in range(10**6):
            sample(store, 1, number)

    def write(_):
        while True:
            insert(store)

    sampler, writer = forked(draw)[0], forked(write)[0]
    until(lambda: store.counters()["selected"] > 20)
    os.kill(sampler, signal.SIGSTOP)
    os.waitpid(sampler, os.WUNTRACED)
    waiting = until(
        lambda: [each for each in store.limiter.status().waiting if each.kind == "insert"] or None
    )
    assert [each.pid for each in waiting] == [writer]
    # Whoever still draws lets the writer go on: the suspended one holds nothing.
    before = store.counters()["inserted"]
    for number in range(20):
        until(lambda: store.limiter.status().admits_sample)
        sample(store, 1, number)
    until(lambda: store.counters()["inserted"] >= before + 10)
    drawn = store.counters()["selected"]
    os.kill(sampler, signal.SIGCONT)
    until(lambda: store.counters()["selected"] > drawn + 20)
    kill(writer)
    (waiting,) = until(lambda: store.limiter.status().waiting)
    assert (waiting.pid, waiting.kind) == (sampler, "sample")
    kill(sampler)
    assert store.limiter.status().waiting == ()


def test_writers_and_samplers_that_are_killed_at_any_moment_do_not_stop_the_others():
    store = store_of(samples_per_insert=2.0, min_size=4, error_buffer=10.0)

    def draw(_):
        for number in range(10**6):
            sample(store, 3, number)

    def write(_):
        while True:
            insert(store, 2)

    for attempt in range(12):
        writer, sampler = forked(write)[0], forked(draw)[0]
        counters = store.counters()
        wanted = counters["inserted"] + 7 * attempt, counters["selected"] + 11 * attempt
        until(
            lambda wanted=wanted: (
                store.counters()["inserted"] >= wanted[0] and store.counters()["selected"] >= wanted[1]
            )
        )
        kill(writer)
        kill(sampler)
        # Bounds of the rule: the buffer, and one request of each side. A kill may lose the count of one request.
        status = store.limiter.status()
        assert -10 - 3 - 4 * attempt <= status.error <= 10 + 4 + 3 * (attempt + 1)
        assert status.waiting == ()
        assert status.admits_insert or status.admits_sample
    assert store.counters()["inserted"] > 100


def test_a_writer_that_holds_reserved_rows_does_not_wait_for_itself():
    """Reserved rows do not count: else their writer would wait for draws of rows that it has not committed."""
    store = store_of(samples_per_insert=1.0, min_size=1, error_buffer=0.0, timeout_s=AT_ONCE_S)
    with store.allocate() as first, store.allocate() as second, store.allocate() as third:
        for row in (first, second, third):
            row.commit(1)
    assert store.limiter.status().error == 2.0
    with pytest.raises(ReplayTimeoutError, match=rf"inserting 1 row .* timeout_s={AT_ONCE_S}"):
        store.allocate()


def test_a_stream_that_waits_can_be_closed():
    store = store_of(samples_per_insert=4.0, min_size=4, error_buffer=16.0)
    insert(store, 6)
    stream = BatchStream(store, Uniform(), [Subscription(column="obs")], 4, seed=0, ahead=8)
    for _ in range(6):
        next(stream)
    until(lambda: store.limiter.status().waiting)
    stream.close()
    assert store.limiter.status().waiting == ()
    assert not [thread for thread in threading.enumerate() if thread.name == "replay-stream"]


def test_a_writer_on_another_host_that_waits_does_not_lose_its_shard(monkeypatch):
    monkeypatch.setattr("actors.replay.calls._PATIENCE_S", 0.0)
    store = store_of(samples_per_insert=1.0)
    insert(store, 2)
    with (
        ReplayShard(store, host_id="there") as shard,
        ReplayShards([shard.address], host_id="here", timeout_s=LIMIT_S) as table,
    ):
        inserted = []
        writer = threading.Thread(target=lambda: inserted.append(table.insert(content([7]))))
        writer.start()
        until(lambda: store.limiter.status().waits["insert"] >= 3)  # it asks again
        assert not inserted
        select(table, Uniform(), 2, seed=0, draw=0)  # by other connections
        writer.join(LIMIT_S)
        assert len(inserted) == 1
        assert list(table.present) == [0]
    assert not writer.is_alive()


def test_a_wait_ends_when_the_store_is_closed_or_the_caller_gives_up():
    store = store_of(min_size=2)
    answers = iter([True, False])
    with pytest.raises(RateLimitedError, match="was given up"):
        select(store, Uniform(), 1, seed=0, draw=0, keep_waiting=lambda: next(answers))

    def close():
        store.close()
        return True

    with pytest.raises(ReplayError, match="this replay store is closed"):
        select(store, Uniform(), 1, seed=0, draw=0, keep_waiting=close)


# ---- what Reverb's users have met (issues of google-deepmind/reverb). A checkpoint is a table and the limiter's state.


def restored(state, rows, limit=None, capacity=20):
    """A new store with so many rows and the limiter of a checkpoint."""
    store = ReplayStore.create(SCHEMA, capacity)
    insert(store, rows)
    store.limiter.restore(json.loads(json.dumps(state)))
    if limit is not None:
        store.limiter.set(limit)
    return store


def saved_and_restored(tmp_path, store, **limit):
    """A store with another limit, and the rows of a checkpoint of this one."""
    with ReplayCheckpointer(store) as checkpointer:
        folder = checkpointer.save(tmp_path).folder
    found = ReplayStore.create(SCHEMA, store.capacity, limit=RateLimit(**limit) if limit else None)
    with ReplayCheckpointer(found) as checkpointer:
        assert checkpointer.restore(tmp_path).folder == folder
    return found


def test_a_checkpoint_goes_on_with_its_limiter_if_the_limit_is_the_same(tmp_path):
    limit = {"samples_per_insert": 0.1, "min_size": 4, "error_buffer": (1.0, math.inf)}
    store = store_of(**limit, timeout_s=5.0)
    insert(store, 16)
    sample(store)
    before = store.limiter.status()
    found = saved_and_restored(tmp_path, store, **limit, timeout_s=AT_ONCE_S).limiter.status()
    assert (found.inserts, found.samples, found.error) == (before.inserts, before.samples, before.error)
    assert found.limit.timeout_s == AT_ONCE_S


def test_reverb_103_a_checkpoint_brings_no_limit_with_it(tmp_path):
    store = store_of(samples_per_insert=8.0, error_buffer=2.0)
    insert(store, 2)  # error 8: the next insertion would wait
    assert saved_and_restored(tmp_path, store).limiter.status().limit is None
    other = saved_and_restored(tmp_path, store, samples_per_insert=1.0, min_size=4, error_buffer=3.0)
    status = other.limiter.status()
    assert (status.inserts, status.error, status.admits_insert) == (-2, 3.0 - 2.0, True)
    fresh = ReplayStore.create(SCHEMA, 20)
    insert(fresh, 5)
    later = saved_and_restored(tmp_path / "unlimited", fresh, samples_per_insert=1.0, min_size=4)
    assert (later.limiter.status().inserts, later.limiter.status().error) == (0, 0.0)


def test_reverb_103_a_restored_table_that_refuses_inserts_says_so_and_can_be_given_another_limit():
    """The table of a forgotten checkpoint brought its rate limiter; the first insert hung, and nothing said why."""
    state = {
        **store_of(samples_per_insert=8.0, error_buffer=2.0, timeout_s=AT_ONCE_S).limiter.state(),
        "inserts": 2,
    }
    store = restored(state, 3)
    with pytest.raises(ReplayTimeoutError, match=r"inserting 1 row .*samples_per_insert=8.0"):
        insert(store)
    assert not store.limiter.status().admits_insert
    insert(restored(state, 3, RateLimit(timeout_s=AT_ONCE_S)))


def test_reverb_118_a_table_saved_at_its_bound_goes_on_from_there():
    """Its counters: 256 * 100073 - 25503488 = 115200 = min_diff, to the sample. Every draw hung after the restore."""
    limit = RateLimit(
        samples_per_insert=256.0, min_size=1, error_buffer=(115_200.0, math.inf), timeout_s=AT_ONCE_S
    )
    state = ReplayStore.create(SCHEMA, 20, limit=limit).limiter.state()
    # Reverb counts from 0 and has min_diff = 115200 = 256 * 500 - 12800; here the error at that bound is -12800.
    state |= {"below": 12_800.0, "min_size": 500, "inserts": 100_073 - 500, "samples": 25_503_488}
    store = restored(state, 500, capacity=500)
    status = store.limiter.status()
    assert (status.error, status.admits_sample, status.admits_insert) == (-12_800.0, False, True)
    with pytest.raises(ReplayTimeoutError, match=r"drawing 1 row .* error is -12800"):
        sample(store)
    insert(store)
    sample(store, 256)  # as the uninterrupted run: 256 for the new row
    with pytest.raises(ReplayTimeoutError):
        sample(store)
    # Training on what is there, without a writer, is one call away; and so is another ratio from here on.
    store.limiter.set(RateLimit())
    sample(store, 10_000)
    restored(state, 500, RateLimit(samples_per_insert=1.0, error_buffer=1.0), capacity=500)


def test_reverb_147_loading_rows_never_waits_for_the_limiter():
    """Loading hung for ever. Rows that are loaded before their limit pass none, and are not counted by it."""
    state = store_of(samples_per_insert=1.0, min_size=1, error_buffer=1.0).limiter.state()
    store = restored(state, 20)
    assert (len(store), store.limiter.status().error) == (20, -1.0)
    store.limiter.set(None)  # to load more into a store that is in use
    insert(store, 20)
    store.limiter.restore(state)
    assert store.limiter.status().admits_insert


def test_reverb_64_a_restored_table_below_min_size_says_so_and_takes_inserts():
    state = store_of(samples_per_insert=1.0, min_size=10, timeout_s=AT_ONCE_S).limiter.state()
    for rows in range(10):
        store = restored(state, rows)
        with pytest.raises(
            ReplayTimeoutError, match=rf"{counted(rows, 'row')}, and its limit needs {10 - rows} more"
        ):
            sample(store)
        insert(store, 10 - rows)
        assert len(store) == 10


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from([0.1, 1.0, 8.0]),
    buffer=st.sampled_from([0.0, 3.0]),
    inserts=st.integers(-4, 10_000),
    samples=st.integers(0, 100_000),
    rows=st.integers(0, 8),
    other=st.booleans(),
)
def test_no_restored_state_blocks_both_sides(ratio, buffer, inserts, samples, rows, other):
    limit = RateLimit(samples_per_insert=ratio, min_size=4, error_buffer=buffer)
    state = ReplayStore.create(SCHEMA, 8, limit=limit).limiter.state()
    store = restored(state | {"inserts": inserts, "samples": samples}, rows, limit if other else None, 8)
    limiter = store.limiter
    assert limiter.admits(INSERT) or limiter.admits(SAMPLE)
    if other:  # a limit that is given anew is never further away than one request
        assert abs(limiter.status().error) <= buffer + ratio * max(0, 4 - rows)


def test_reverb_134_the_limit_is_off_while_offline_data_is_loaded():
    store = ReplayStore.create(SCHEMA, 20)
    insert(store, 15)
    store.limiter.set(RateLimit(samples_per_insert=1.0, error_buffer=1.0, timeout_s=AT_ONCE_S))
    assert store.limiter.status().error == 0.0
    insert(store, 2)
    with pytest.raises(ReplayTimeoutError):
        insert(store)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: RateLimit(samples_per_insert=0.0), "samples_per_insert is 0.0: use a positive number"),
        (lambda s: RateLimit(samples_per_insert=math.nan), "samples_per_insert is nan"),
        (lambda s: RateLimit(samples_per_insert=1e30), "samples_per_insert is 1e\\+30"),
        (lambda s: RateLimit(min_size=0), "min_size is 0"),
        (lambda s: RateLimit(error_buffer=-1.0), "error_buffer is -1.0: use one number that is at least 0"),
        (lambda s: RateLimit(error_buffer=(1.0, math.nan)), "error_buffer is"),
        (lambda s: RateLimit(error_buffer=(1.0,)), "error_buffer is"),
        (lambda s: RateLimit(timeout_s=0.0), "timeout_s is 0.0"),
        (lambda s: RateLimit(timeout_s=math.nan), "timeout_s is nan"),
        (lambda s: s.limiter.set(RateLimit(min_size=5)), "min_size is 5 where the store has 4 rows"),
        (lambda s: s.limiter.restore({}), "is no state of a rate limiter: 'samples_per_insert'"),
        (lambda s: s.limiter.restore({**state_of_one(), "inserts": 2**70}), "both below 2"),
        (lambda s: s.limiter.restore({**state_of_one(), "inserts": -2}), "inserts are at least -min_size"),
        (lambda s: s.limiter.restore({**state_of_one(), "samples": -1}), "samples at least 0"),
        (lambda s: s.limiter.restore({**state_of_one(), "offset": None}), "is no state of a rate limiter"),
        (lambda s: s.limiter.restore({**state_of_one(), "offset": math.nan}), "both below 2"),
        (lambda s: s.limiter.restore({**state_of_one(), "below": -3.0}), "error_buffer is"),
    ],
)
def test_bad_limits_are_explained(act, message):
    store = ReplayStore.create(SCHEMA, 4)
    with pytest.raises(ReplayError, match=message) as raised:
        act(store)
    assert "\n" not in str(raised.value)
    assert store.limiter.status().limit is None


def state_of_one():
    return store_of(samples_per_insert=1.0).limiter.state()


def test_a_timeout_arrives_as_itself_from_another_process():
    store = store_of(min_size=2, timeout_s=AT_ONCE_S)
    with pytest.raises(TimeoutError) as raised:
        sample(store)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy)) == (ReplayTimeoutError, str(raised.value))
