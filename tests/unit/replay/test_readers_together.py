"""Readers of one table whose rows may be sampled a few times: what each gets counts once, and nothing else counts."""

import os
import re
import signal
import threading
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_processes import LIMIT_S, forked, killed_when
from replay_tables import SCHEMA, content, spilling

from actors.replay import (
    Prioritized,
    RateLimit,
    ReplayError,
    ReplayStore,
    Uniform,
    WithoutReplacement,
    select,
    select_centralised,
)
from actors.replay.kernel import COMMITTED, DELETED
from actors.replay.rows import Keys
from actors.replay.table import LocalShards

SELECTORS = (Uniform(), Prioritized(0.5))


def shards_of(num_shards, rows, max_times_sampled):
    shards = []
    for shard in range(num_shards):
        place = {"shard": shard, "num_shards": num_shards, "max_times_sampled": max_times_sampled}
        store = ReplayStore.create(SCHEMA, rows // num_shards, selectors=SELECTORS, **place)
        store.insert(content(range(rows // num_shards)))
        shards.append(store)
    return shards


def draws_left(shards, most=10**6):
    return LocalShards(shards).draws_left(0, most)


@pytest.mark.parametrize("choose", [select, select_centralised])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(
    ("selector", "looks", "max_times_sampled", "sentence"),
    [
        (Uniform(), ["draws_left"], 2, "12 rows were requested where .* can be selected 5 times"),
        (Prioritized(0.5), ["draws_left"], 2, "12 rows were requested where .* can be selected 5 times"),
        (
            WithoutReplacement(),
            ["snapshot", "leaves"],
            1,
            "6 different rows requested where 3 can be selected",
        ),
    ],
)
def test_a_reader_that_is_left_too_few_rows_gets_none_and_uses_none_up(
    selector, looks, max_times_sampled, sentence, num_shards, choose
):
    """It stops between its look at what is left and its draw; another process draws meanwhile."""
    shards = shards_of(num_shards, 8, max_times_sampled)
    wanted, taken = (6, 5) if max_times_sampled == 1 else (12, 11)

    def stop_after_a_look(look, *arguments):
        answer = look(*arguments)
        for name in looks:
            delattr(shards[-1], name)
        signal.raise_signal(signal.SIGSTOP)
        return answer

    def work(pipe):
        for name in looks:
            setattr(shards[-1], name, partial(stop_after_a_look, getattr(shards[-1], name)))
        try:
            choose(shards, selector, wanted, seed=0, draw=0)
        except ReplayError as error:
            os.write(pipe, str(error).encode())
        os._exit(0)

    child, read = forked(work)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    first = choose(shards, selector, taken, seed=0, draw=1)
    left = 8 * max_times_sampled - taken
    assert draws_left(shards) == left
    os.kill(child, signal.SIGCONT)
    with os.fdopen(read, "rb") as pipe:
        assert re.match(sentence, pipe.read().decode())
    assert os.waitpid(child, 0)[1] == 0
    assert draws_left(shards) == left
    assert sum(store.counters()["selected"] for store in shards) == taken
    # All that is left can still be selected, and nothing more.
    second = choose(shards, selector, left, seed=0, draw=2)
    indices = np.concatenate((first.keys.indices, second.keys.indices))
    assert np.bincount(indices).tolist() == 8 * [max_times_sampled]
    with pytest.raises(ReplayError, match=r"nothing can be selected|where 0 can be selected"):
        choose(shards, selector, 1, seed=0, draw=3)


class TakingTurns(LocalShards):
    """A table whose reader waits for its turn before each question."""

    def __init__(self, shards):
        super().__init__(shards)
        self.go, self.stopped, self.is_free = threading.Semaphore(0), threading.Semaphore(0), False

    def ask(self, call, arguments):
        if not self.is_free:
            self.stopped.release()
            assert self.go.acquire(timeout=LIMIT_S)
        return super().ask(call, arguments)


class Reader:
    """Selects several times in a thread of its own, one question after the other, each on request."""

    def __init__(self, shards, choose, requests, number):
        self.table, self.delivered, self.ended = TakingTurns(shards), [], False
        self._request = choose, requests, number
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self._until_it_stops()

    def _work(self):
        choose, requests, number = self._request
        for draw, (selector, k) in enumerate(requests):
            try:
                chosen = choose(self.table, selector, k, seed=number, draw=draw)
            except ReplayError:
                continue
            assert len(chosen) == k
            self.delivered += chosen.keys.indices.tolist()
        self.ended = True
        self.table.stopped.release()

    def _until_it_stops(self):
        assert self.table.stopped.acquire(timeout=LIMIT_S)

    def step(self):
        self.table.go.release()
        self._until_it_stops()

    def leave(self):
        """Of a test that failed."""
        self.table.is_free = True
        self.table.go.release()
        self._thread.join(LIMIT_S)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_the_order_each_draw_counts_once_and_all_are_delivered(data):
    num_shards, per_shard = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    rows, most = num_shards * per_shard, data.draw(st.integers(1, 3))
    shards = shards_of(num_shards, rows, most)
    selectors = st.sampled_from([*SELECTORS, WithoutReplacement()])
    requests = st.lists(st.tuples(selectors, st.integers(1, rows * most)), min_size=1, max_size=3)
    centralised = data.draw(st.booleans())
    readers = [
        Reader(shards, select_centralised if centralised else select, data.draw(requests), number)
        for number in range(data.draw(st.integers(2, 3)))
    ]
    try:
        while waiting := [reader for reader in readers if not reader.ended]:
            data.draw(st.sampled_from(waiting)).step()
    finally:
        for reader in readers:
            reader.leave()
    delivered = Counter(index for reader in readers for index in reader.delivered)
    status = np.concatenate([store.status() for store in shards])
    assert status["sampled"].tolist() == [delivered[index] for index in range(rows)]
    assert draws_left(shards) == rows * most - delivered.total()
    assert sum(store.counters()["selected"] for store in shards) == delivered.total()
    for draw in range(draws_left(shards)):
        delivered[int(select(shards, Uniform(), 1, seed=9, draw=draw).keys.indices[0])] += 1
    assert delivered == dict.fromkeys(range(rows), most)
    assert (np.concatenate([store.status() for store in shards])["state"] == DELETED).all()


def order_of(store, first, link):
    """Committed rows as they are linked from the first or last on."""
    at, order = getattr(store._header, first), []
    while at >= 0:
        order.append(int(at))
        at = store._rows[link][at]
    return order


def test_rows_that_return_have_their_place_in_the_order_of_removal(tmp_path):
    """Also of a table most of whose rows are spilled."""
    for store in (
        ReplayStore.create(SCHEMA, 6, max_times_sampled=1),
        spilling(tmp_path, 6, 2, max_times_sampled=1),
    ):
        inserted = [store.insert(content([number])) for number in range(6)]
        keys = Keys(*map(np.concatenate, zip(*inserted, strict=True)))
        for some in ([3], [0, 5, 2], [1, 4, 5], [5, 4, 3, 2, 1, 0]):
            part = Keys(keys.indices[some], keys.generations[some])
            assert store.mark(part).all()
            assert sorted(order_of(store, "oldest", "next")) == sorted(set(range(6)) - set(some))
            assert not store.mark(part).any()
            store.unmark(part)
            assert order_of(store, "oldest", "next") == [0, 1, 2, 3, 4, 5]
            assert order_of(store, "newest", "prev") == [5, 4, 3, 2, 1, 0]
        assert (len(store), store.counters()["selected"]) == (6, 0)
        assert store.metrics().spilled_rows == 6 - store.slots
        for number in range(6):
            assert store.insert(content([number])).indices.tolist() == [number]


def test_what_others_have_deleted_or_overwritten_does_not_return():
    limit = RateLimit(samples_per_insert=10.0, error_buffer=100.0)
    store = ReplayStore.create(SCHEMA, 4, max_times_sampled=2, limit=limit)
    keys = store.insert(content(range(4)))
    store.mark(keys)
    store.mark(Keys(keys.indices[:2], keys.generations[:2]))  # 0 and 1 are used up
    assert store.delete(Keys(keys.indices[2:3], keys.generations[2:3])) == 1
    assert store.insert(content([7])).indices.tolist() == [0]  # deleted rows are overwritten in their order
    assert (store.counters()["selected"], store.limiter.status().samples) == (6, 6)
    store.unmark(keys)
    assert (store.counters()["selected"], store.limiter.status().samples) == (2, 2)
    status = store.status()
    assert status["state"].tolist() == [COMMITTED, COMMITTED, DELETED, COMMITTED]
    assert status["generation"].tolist() == [2, 1, 1, 1]
    assert status["sampled"].tolist() == [0, 1, 0, 0]
    assert draws_left([store]) == 2 + 1 + 2
    store.unmark(keys)  # never below 0
    assert store.status()["sampled"].tolist() == [0, 0, 0, 0]


def test_a_row_whose_last_selection_was_counted_by_a_reader_that_was_killed_is_not_selected_again():
    store = ReplayStore.create(SCHEMA, 2, max_times_sampled=1)
    keys = store.insert(content(range(2)))
    killed_when(lambda: store.mark(keys), lambda: store._rows["sampled"][0] == 1)
    assert select(store, Uniform(), 1, seed=0, draw=0).keys.indices.tolist() == [1]
    assert store.counters()["recovered"] == 1
    assert store.status()["state"].tolist() == [DELETED, DELETED]
