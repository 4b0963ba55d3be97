"""A consumer that hangs loses its batches to others, and learns that; nobody reads torn data, and no row is read twice."""

import os
import random
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from channel_cases import LIMIT_S

from collectives import futex
from collectives.experience import file_layout, spsc_queue
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelTimeoutError, LeaseExpiredError
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from tests.unit.forkserver import context

NUMBERS = ExperienceSchema("numbers", (Field(name="number", dtype=torch.int64),))
LEASE_S = 0.2

pytestmark = pytest.mark.skipif(not futex.can_claim(), reason="this kernel lacks FUTEX_TRYLOCK_PI")


def consume(pipe):
    """Take a batch at each command, release it at the next; report numbers, and leases that expired."""
    consumer = ConsumerEndpoint(NUMBERS)
    pipe.send(consumer.endpoint)
    while pipe.recv() == "take":
        batch = consumer.take(LIMIT_S)
        pipe.send(batch.sequence)
        pipe.recv()
        numbers = batch["number"].tolist()
        try:
            batch.release()
        except LeaseExpiredError as error:
            pipe.send(str(error))
        else:
            pipe.send(numbers)


class Reader:
    """A consumer in a process that can be stopped."""

    def __init__(self):
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=consume, args=(theirs,), daemon=True)
        self.process.start()
        self.endpoint = self.pipe.recv()

    def ask(self, word):
        self.pipe.send(word)
        return self.pipe.recv()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        with open(f"/proc/{self.process.pid}/stat") as file:
            while file.read().rsplit(")", 1)[1].split()[0] != "T":
                file.seek(0)

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def reader():
    one = Reader()
    yield one
    one.process.kill()
    one.process.join(LIMIT_S)


def put(ring, number, timeout_s=LIMIT_S):
    slot = ring.reserve(1, timeout_s=timeout_s)
    slot["number"].fill_(number)
    slot.commit(version=0)


def test_a_stopped_reader_loses_its_batch_to_another_and_learns_that(reader):
    ring, other = ProducerRing(NUMBERS, rows=1, slots=1, lease_s=LEASE_S), ConsumerEndpoint(NUMBERS)
    ring.attach(reader.endpoint)
    put(ring, 11)
    assert reader.ask("take") == 1
    ring.attach(other.endpoint)
    reader.stop()
    wait_for_backlog(ring, 1)
    with other.take(LIMIT_S) as batch:
        assert batch["number"].tolist() == [11]
    put(ring, 12)  # overwrites what the stopped reader has
    with other.take(LIMIT_S) as batch:
        assert batch["number"].tolist() == [12]
    reader.go_on()
    assert "batch 1 of producer 0 was held longer than its lease" in reader.ask("release")
    other.close()
    put(ring, 13)  # the reader reacts again, and gets batches again
    assert reader.ask("take") == 3
    assert reader.ask("release") == [13]
    assert ring.drain(LIMIT_S) == 0


def test_a_lease_does_not_begin_anew_where_the_queue_has_come_round(monkeypatch):
    """The place behind the newest entry is cleared, and is no entry of the first slot."""
    now = [0.0]
    monkeypatch.setattr(spsc_queue, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ring = ProducerRing(NUMBERS, rows=1, slots=2, lease_s=10.0)
    first, other = ConsumerEndpoint(NUMBERS), ConsumerEndpoint(NUMBERS)
    ring.attach(first.endpoint)
    put(ring, 11)
    held = first.take(LIMIT_S)
    for number in (12, 13, 14):  # in the second slot
        put(ring, number)
        first.take(LIMIT_S).release()
    now[0] = 9.9
    ring.attach(other.endpoint)
    ring.update()
    with pytest.raises(ChannelTimeoutError):
        other.take(0.0)
    now[0] = 10.0
    ring.update()
    with other.take(LIMIT_S) as batch:
        assert batch["number"].tolist() == [11]
    with pytest.raises(LeaseExpiredError):
        held.release()
    first.close()
    other.close()
    ring.close()


def wait_for_backlog(ring, backlog):
    """Until this process's consumer has so many batches."""
    deadline = time.monotonic() + LIMIT_S
    while [state.backlog for state in ring.consumers() if state.pid == os.getpid()] != [backlog]:
        assert time.monotonic() < deadline


def test_what_a_stopped_reader_had_not_taken_goes_to_another_and_it_skips_that(reader):
    ring, other = ProducerRing(NUMBERS, rows=1, slots=2, lease_s=LEASE_S), ConsumerEndpoint(NUMBERS)
    ring.attach(reader.endpoint)
    reader.stop()
    for number in (11, 12):
        put(ring, number)
    ring.attach(other.endpoint)
    wait_for_backlog(ring, 2)
    for number in (11, 12, 13, 14):
        if number > 12:
            put(ring, number)  # not to the late reader
        with other.take(LIMIT_S) as batch:
            assert batch["number"].tolist() == [number]
    other.close()
    put(ring, 15)
    reader.go_on()
    reader.pipe.send("take")
    while not reader.pipe.poll(0.01):  # it skips 11 and 12, and then gets what waited for it
        ring.update()
    assert reader.pipe.recv() == 5
    assert reader.ask("release") == [15]


def test_the_only_reader_loses_nothing():
    ring, consumer = ProducerRing(NUMBERS, rows=1, slots=1, lease_s=0.0), ConsumerEndpoint(NUMBERS)
    ring.attach(consumer.endpoint)
    put(ring, 1)
    batch = consumer.take(LIMIT_S)
    with pytest.raises(ChannelTimeoutError):
        ring.reserve(timeout_s=0.1)
    batch.release()
    assert ring.drain(LIMIT_S) == 0


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_each_batch_is_consumed_once_and_whole(seed):
    """With a lease of 0 s each call of the ring revokes what a consumer has, as long as another one is not late."""
    pace = random.Random(seed)
    ring = ProducerRing(NUMBERS, rows=1, slots=3, lease_s=0.0)
    consumers = [ConsumerEndpoint(NUMBERS) for _ in range(3)]
    for consumer in consumers:
        ring.attach(consumer.endpoint)
    held, read, void, count = [], [], 0, 0
    while len(read) < 100:
        action = pace.randrange(4)
        with suppress(ChannelTimeoutError):
            if action == 0 and count < 100:
                put(ring, count + 1, timeout_s=0.0)
                count += 1
            elif action == 1:
                held.append(pace.choice(consumers).take(timeout_s=0.0))
            elif action == 2 and held:
                batch = held.pop(pace.randrange(len(held)))
                numbers = batch["number"].tolist()
                try:
                    batch.release()
                    read += numbers
                except LeaseExpiredError:
                    void += 1
            elif action == 3:
                ring.update()
    assert sorted(read) == list(range(1, 101))
    assert void > 0


def revoke_and_die(endpoints, pipe):
    """Post a batch, revoke it at the parent's command, and be killed right after the claim."""
    ring = ProducerRing(NUMBERS, rows=1, slots=1, lease_s=0.0)
    for endpoint in endpoints:
        ring.attach(endpoint)
    slot = ring.reserve()
    slot["number"].fill_(7)
    claim = futex.claim

    def claim_and_die(address):
        claim(address)
        os.kill(os.getpid(), signal.SIGKILL)

    futex.claim = claim_and_die
    slot.commit(version=0, to=0)
    pipe.recv()
    ring.update()


def test_a_batch_whose_producer_was_killed_while_it_revoked_it_is_read_once():
    first, second = ConsumerEndpoint(NUMBERS), ConsumerEndpoint(NUMBERS)
    ours, theirs = context.Pipe()
    process = context.Process(target=revoke_and_die, args=([first.endpoint, second.endpoint], theirs))
    process.start()
    batch = first.take(LIMIT_S)
    ours.send("revoke")
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(ChannelTimeoutError):
        second.take(timeout_s=0.2)
    with pytest.raises(LeaseExpiredError):
        batch.release()
    with second.take(LIMIT_S) as again:
        assert again["number"].tolist() == [7]
    assert second.take(LIMIT_S) is None


def test_a_word_is_claimed_once():
    ring = ProducerRing(NUMBERS, rows=1)
    address = ring._file.word_address(file_layout.BLOCKED_NS)  # any word that is 0
    assert [futex.claim(address) for _ in range(3)] == [True, False, False]
