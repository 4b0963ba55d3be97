"""Rows of a channel go into a table beside the consumer: each once, whole, and into another shard if one is lost."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from replay_tables import LENGTH, SCHEMA, content
from shard_processes import ShardProcess

from actors.replay import ReplayError, ReplayShards, ReplayStore, ShardLostError
from actors.replay_intake import ReplayIntake
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import LeaseExpiredError
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

FIELDS = (
    Field(name="obs", shape=(LENGTH + 1, 3)),
    Field(name="action", dtype=torch.int16, shape=(LENGTH,)),
    Field(name="done", dtype=torch.bool, shape=(LENGTH,)),
    Field(name="length", dtype=torch.int64),
    Field(name="priority", dtype=torch.float64),
)
CHANNEL = ExperienceSchema("replay", FIELDS)


@pytest.fixture
def channel():
    with ExitStack() as stack:
        endpoint = stack.enter_context(ConsumerEndpoint(CHANNEL))
        ring = ProducerRing(CHANNEL, rows=4, slots=8)
        stack.callback(ring.close, timeout_s=0.0)
        ring.attach(endpoint.endpoint)
        yield ring, endpoint


def put(ring, numbers):
    numbers = torch.tensor(numbers)
    rows = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in content(numbers).items()}
    ring.put({**rows, "length": 1 + numbers % LENGTH, "priority": numbers.double()}, version=0)


def numbers_in(table):
    status = table.status()
    held = status[status["state"] == 2]
    np.testing.assert_array_equal(held["length"], 1 + held["priority"].astype(int) % LENGTH)
    return sorted(held["priority"].astype(int).tolist())


def test_each_row_of_the_channel_becomes_a_row_of_the_table(channel):
    ring, endpoint = channel
    with ReplayStore.create(SCHEMA, 20) as store:
        intake = ReplayIntake(endpoint, store)
        for first in range(0, 12, 4):
            put(ring, [first, first + 1, first + 2, first + 3])
        put(ring, [12])
        assert [len(intake.take().indices) for _ in range(4)] == [4, 4, 4, 1]
        assert numbers_in(store) == list(range(13))
        for index in range(13):
            for name, wanted in content([index]).items():
                length = 1 + index % LENGTH
                np.testing.assert_array_equal(store.block(name, index)[:length], wanted[0][:length])
        assert endpoint.leaks == 0
        assert ring.drain(0.0) == 0
        ring.close(timeout_s=0.0)
        assert intake.take() is None


def test_a_batch_goes_into_another_shard_and_waits_if_all_are_lost(channel):
    ring, endpoint = channel
    with ExitStack() as stack:
        made = [ShardProcess(20, k, 2, host_id="away", filled=False) for k in range(2)]
        for process in made:
            stack.callback(process.kill)
        addresses = [process.address for process in made]
        table = stack.enter_context(ReplayShards(lambda: addresses, host_id="here"))
        intake = ReplayIntake(endpoint, table)
        put(ring, [1, 2])
        assert intake.take().indices.tolist() == [0, 1]
        made[1].kill()
        put(ring, [3])
        assert intake.take().indices.tolist() == [2]
        made[0].kill()
        put(ring, [4])
        with pytest.raises(ShardLostError, match="all shards of the table are lost"):
            intake.take()
        again = ShardProcess(20, 0, 2, host_id="away", incarnation=1, filled=False)
        stack.callback(again.kill)
        addresses[0] = again.address
        table.join()
        assert intake.take().indices.tolist() == [0]
        assert numbers_in(table) == [4]
        assert ring.drain(0.0) == 0


def test_rows_whose_lease_has_expired_are_taken_out_again(channel, monkeypatch):
    ring, endpoint = channel
    with ReplayStore.create(SCHEMA, 20) as store:
        intake = ReplayIntake(endpoint, store)
        put(ring, [1, 2])
        batch = endpoint.take()
        batch.release()

        class Expired:
            """As a batch that another consumer has got."""

            def __init__(self):
                self.tensors = {name: torch.from_numpy(values) for name, values in content([1, 2]).items()}
                self.tensors |= {
                    "length": torch.tensor([2, 3]),
                    "priority": torch.tensor([1.0, 2.0]).double(),
                }

            def __getitem__(self, name):
                return self.tensors[name]

            def release(self):
                raise LeaseExpiredError("replay", "was held longer than its lease")

        monkeypatch.setattr(endpoint, "take", lambda timeout_s: Expired())
        with pytest.raises(LeaseExpiredError):
            intake.take()
        assert len(store) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"obs": Field(name="obs", shape=(LENGTH, 3))},
            r"has obs: float32\[8, 3\] where the table expects rows of 9",
        ),
        ({"action": Field(name="action", shape=(LENGTH,))}, "has action: float32"),
        ({"done": Field(name="ended", dtype=torch.bool, shape=(LENGTH,))}, "has no field 'done'"),
    ],
)
def test_a_channel_without_the_tables_columns_is_refused(change, message):
    fields = tuple(change.get(field.name, field) for field in FIELDS)
    store, endpoint = ReplayStore.create(SCHEMA, 2), ConsumerEndpoint(ExperienceSchema("c", fields))
    with store, endpoint, pytest.raises(ReplayError, match=message):
        ReplayIntake(endpoint, store)
