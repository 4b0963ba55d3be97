"""Experience for a consumer on another host: two Ray nodes on this one, whose second says that it is elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.relay import Relays
from collectives.experience.batcher import Batcher
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.migrator import Migrator
from collectives.experience.packer import ChannelPlan
from collectives.experience.schema import ExperienceSchema, Field
from tests.cluster.two_nodes import two_nodes
from tests.unit.collectives.experience.file_directory import FileDirectory

pytestmark = pytest.mark.cluster

LIMIT_S = 60.0
NAME = "experience"
ROWS, LARGE = 2, 40_000
"""Rows of a transfer; numbers in a row: more than what Ray sends within a call."""
PLAN = ChannelPlan(
    (
        ExperienceSchema(
            "counts", (Field(name="count", dtype=torch.int64), Field(name="large", shape=(LARGE,)))
        ),
        ExperienceSchema("finals", (Field(name="env", dtype=torch.int64), Field(name="last"))),
    ),
    ragged=frozenset({"finals"}),
)


@pytest.fixture(scope="module")
def nodes():
    # Workers cannot import this file: its classes travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with two_nodes() as (_, there):
        yield there.node_id


class Trainer:
    """A consumer that says that it is on another host."""

    def __init__(self, folder, index, node):
        torch.set_num_threads(1)
        self.held = None
        self.batcher = Batcher(PLAN, rows=ROWS)
        self.batcher.announce(FileDirectory(folder), NAME, index, node=node, host_id=f"the host of {node}")

    def process(self):
        return os.getpid()

    def take(self, number, hold=False):
        """First counts of so many transfers, each checked; the last is not released if it is to be held."""
        counts = [self._take_one(LIMIT_S) for _ in range(number)]
        if not hold:
            self.held.release()
        return counts

    def take_and_listen(self, number):
        """The same, what else comes within a second, and how many parts came twice."""
        counts = self.take(number)
        try:
            counts.append(self._take_one(timeout_s=1.0))
        except ChannelTimeoutError:
            return counts, self.batcher.repeated
        return counts, None

    def _take_one(self, timeout_s):
        if self.held is not None:
            self.held.release()
        self.held = experience = self.batcher.next(timeout_s)
        first = int(experience["count"][0])
        assert experience["count"].tolist() == [first, first + 1]
        assert torch.equal(experience["large"], torch.full((ROWS, LARGE), float(first)))
        finals, cut = experience.ragged["finals"], first % 3 == 0
        assert finals["env"].tolist() == [1] * cut
        assert finals["last"].tolist() == [first + 0.5] * cut
        return first


def start_trainer(folder, index, node):
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    trainer = (
        ray.remote(Trainer).options(num_cpus=0, scheduling_strategy=strategy).remote(folder, index, node)
    )
    return trainer, ray.get(trainer.process.remote(), timeout=LIMIT_S)


def send(dispenser, first):
    rows = dispenser.open(LIMIT_S)
    rows["count"].copy_(torch.tensor([first, first + 1]))
    rows["large"].fill_(first)
    cut = {"env": torch.tensor([1]), "last": torch.tensor([first + 0.5])}
    dispenser.send(version=first, ragged={"finals": cut} if first % 3 == 0 else None)


@pytest.fixture
def sender(tmp_path):
    relays = Relays()
    with Dispenser(PLAN, rows=ROWS, producer=0, slots=3) as dispenser:
        Migrator(dispenser, FileDirectory(tmp_path), NAME, remote_route=relays)
        yield dispenser, relays
    relays.close()


def test_whole_transfers_arrive_elsewhere_and_slots_are_kept_until_released(nodes, sender, tmp_path):
    dispenser, _ = sender
    trainer, _ = start_trainer(tmp_path, 0, nodes)
    for count in range(3):
        send(dispenser, count)
    assert ray.get(trainer.take.remote(2, hold=True), timeout=LIMIT_S) == [0, 1]
    deadline = time.monotonic() + LIMIT_S
    while len(dispenser.rings[0].unreleased()) != 2:  # the first is released, the second is held
        assert time.monotonic() < deadline
        dispenser.progress()
    assert dispenser.rings[0].unreleased() == {2, 3}
    ray.kill(trainer)


@pytest.mark.slow
def test_a_relay_that_is_killed_is_replaced_and_nothing_comes_twice(nodes, sender, tmp_path):
    dispenser, relays = sender
    trainer, _ = start_trainer(tmp_path, 0, nodes)
    for count in range(2):
        send(dispenser, count)
    assert ray.get(trainer.take.remote(1), timeout=LIMIT_S) == [0]
    (relay,) = relays._handles.values()
    os.kill(ray.get(relay.process_id.remote(), timeout=LIMIT_S), signal.SIGKILL)
    came = trainer.take_and_listen.remote(7)
    for count in range(2, 8):
        send(dispenser, count)
    assert dispenser.drain(LIMIT_S) == 0
    counts, repeated = ray.get(came, timeout=LIMIT_S)
    assert sorted(counts) == list(range(1, 8))
    # Of the two that the first relay had delivered, those come again whose answer had not reached the sender.
    assert repeated in (0, len(PLAN.groups), 2 * len(PLAN.groups))
    ray.kill(trainer)


@pytest.mark.slow
def test_what_a_killed_trainer_elsewhere_had_goes_to_one_here(nodes, sender, tmp_path):
    dispenser, _ = sender
    trainer, process = start_trainer(tmp_path, 0, nodes)
    for count in range(3):
        send(dispenser, count)
    assert ray.get(trainer.take.remote(1), timeout=LIMIT_S) == [0]
    os.kill(process, signal.SIGKILL)
    with Batcher(PLAN, rows=ROWS) as here:
        here.announce(FileDirectory(tmp_path), NAME, 1)
        counts = []
        deadline = time.monotonic() + LIMIT_S
        while sorted(counts) != [1, 2]:
            assert time.monotonic() < deadline
            dispenser.progress()
            try:
                with here.next(timeout_s=0.05) as experience:
                    counts.append(int(experience["count"][0]))
            except ChannelTimeoutError:
                pass
        assert dispenser.drain(LIMIT_S) == 0
        assert dispenser.rerouted == 2
