"""Replay shards on two Ray nodes, simulated as two raylets of this host, each with a host identity of its own."""

from __future__ import annotations

import os
import signal
import sys

import numpy as np
import pytest
import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.rendezvous import RemoteDirectory, start_rendezvous_actor
from actors.replay import (
    Column,
    Prioritized,
    ReplaySchema,
    ReplayShards,
    ReplayStore,
    Subscription,
    Uniform,
    gather,
    select,
)
from actors.replay_actor import announced_shards, create_shards
from tests.cluster.two_nodes import two_nodes

pytestmark = pytest.mark.cluster

SCHEMA = ReplaySchema(
    (Column(name="obs", dtype="float32", shape=(3,), extra=1), Column(name="step", dtype="int32")), 4
)
SELECTORS = (Uniform(), Prioritized(0.6, 0.4, length=2))
CAPACITY = 50
HOSTS = ["first host", "second host"]
LIMIT_S = 120.0


@pytest.fixture
def nodes():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with two_nodes():
        yield [node["NodeID"] for node in ray.nodes()]


def rows(numbers):
    """Trajectories that hold their number."""
    numbers = np.asarray(numbers, "float32")
    return {
        "obs": np.broadcast_to(numbers[:, None, None], (len(numbers), 5, 3)).copy(),
        "step": np.broadcast_to(np.arange(4, dtype="int32"), (len(numbers), 4)).copy(),
    }


def write(rendezvous, host_id, numbers):
    """A generator on another node: writes beside itself. Returns the shards that it wrote to."""
    found = announced_shards(RemoteDirectory(rendezvous), "t")
    with ReplayShards(found, host_id=host_id) as table:
        keys = table.insert(rows(numbers), priorities=np.asarray(numbers, float))
        return set((keys.indices // table.capacity).tolist())


def test_two_nodes_share_a_table_and_one_of_them_loses_its_shard(nodes):
    rendezvous = start_rendezvous_actor(1)
    handles = create_shards(rendezvous, "t", SCHEMA, CAPACITY, nodes, host_ids=HOSTS, selectors=SELECTORS)
    writes = [
        ray.remote(write)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(rendezvous, host, np.arange(CAPACITY) + CAPACITY * shard)
        for shard, (node, host) in enumerate(zip(nodes, HOSTS, strict=True))
    ]
    assert ray.get(writes, timeout=LIMIT_S) == [{0}, {1}]

    found = announced_shards(RemoteDirectory(rendezvous), "t")
    with ReplayShards(found, host_id=HOSTS[0]) as table:
        assert table.local == [0]
        # The same list and the same batch as those of one store with all rows.
        whole = ReplayStore.create(SCHEMA, 2 * CAPACITY, selectors=SELECTORS)
        whole.insert(rows(np.arange(2 * CAPACITY)), priorities=np.arange(2 * CAPACITY, dtype=float))
        for draw, selector in enumerate(SELECTORS):
            expected = select(whole, selector, 64, seed=5, draw=draw)
            chosen = select(table, selector, 64, seed=5, draw=draw)
            np.testing.assert_array_equal(chosen.keys.indices, expected.keys.indices)
            np.testing.assert_array_equal(chosen.weights, expected.weights)
            batch = gather(table, chosen, [Subscription(column="obs", length=3)])
            assert batch.current.all()
            np.testing.assert_array_equal(batch.values["obs"][:, 0, 0], chosen.keys.indices)
        assert table.update_priorities(chosen.keys, 1.0) == 64

        os.kill(ray.get(handles[1].process_id.remote()), signal.SIGKILL)
        batch = gather(table, chosen, [Subscription(column="obs")])
        np.testing.assert_array_equal(batch.current, chosen.keys.indices < CAPACITY)
        assert [(loss.shard, loss.rows) for loss in table.lost] == [(1, CAPACITY)]
        assert select(table, Uniform(), 64, seed=5, draw=9).keys.indices.max() < CAPACITY

        table.wait(LIMIT_S)  # Ray restarts the actor, which announces its new address
        assert len(table) == CAPACITY
        assert table.incarnation(1) == 1
        table.insert(rows([7.0] * 10), shard=1)
        assert (gather(table, chosen, [Subscription(column="obs")]).current == batch.current).all()
        found = select(table, Uniform(), 64, seed=5, draw=10)
        values = gather(table, found, [Subscription(column="obs")]).values["obs"]
        assert (values[found.keys.indices >= CAPACITY] == 7.0).all()
