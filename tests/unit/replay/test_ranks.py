"""Ranks that train together get one list: by exchange of their shards' parts, and from one rank that selects."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from replay_tables import SELECTORS, columns, shards_of

from actors.replay import Prioritized, select, select_centralised
from actors.replay_ranks import broadcast_selection, exchange_over
from tests.unit.collectives.thread_group import ThreadGroup

ROWS = 30
PRIORITIES = 10 * np.random.default_rng(7).random(ROWS) ** 2


def on_ranks(world_size, work):
    """work(communicator) of every rank, in a thread each."""
    group = ThreadGroup.on_one_device(world_size)

    def member(rank):
        with group.communicator(rank) as communicator:
            return work(communicator)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(member, range(world_size)))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_every_rank_gets_the_list_of_one_store(num_shards):
    (whole,) = shards_of(ROWS, 1, priorities=PRIORITIES, timestamps=np.arange(ROWS) % 7)
    shards = shards_of(ROWS, num_shards, priorities=PRIORITIES, timestamps=np.arange(ROWS) % 7)

    def exchanged(communicator):
        exchange, shard = exchange_over(communicator), shards[communicator.rank]
        return [select(shard, selector, 12, seed=1, draw=0, exchange=exchange) for selector in SELECTORS]

    expected = [select(whole, selector, 12, seed=1, draw=0) for selector in SELECTORS]
    for found in on_ranks(num_shards, exchanged):
        for one, other in zip(expected, found, strict=True):
            for column, same in zip(columns(one), columns(other), strict=True):
                np.testing.assert_array_equal(column, same)
    for shard in shards:  # counted once, in its shard
        part = slice(shard.base, shard.base + shard.capacity)
        np.testing.assert_array_equal(shard.status()["sampled"], whole.status()["sampled"][part])


@pytest.mark.parametrize("choose", [select, select_centralised])
def test_one_rank_selects_for_all(choose):
    shards = shards_of(ROWS, 2, priorities=PRIORITIES)
    selector = Prioritized(0.6, 0.4)

    def selected(communicator):
        own = choose(shards, selector, 12, seed=1, draw=0) if communicator.rank == 1 else None
        return broadcast_selection(communicator, own, source=1)

    expected = select(shards, selector, 12, seed=1, draw=0)
    for found in on_ranks(3, selected):
        for one, other in zip(columns(expected), columns(found), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
