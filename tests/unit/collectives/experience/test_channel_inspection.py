"""Inspection: counters match what happened, and a dump is a batch as it was committed."""

import threading
import time

import pytest
import torch
from channel_cases import LIMIT_S, bits, pair, random_rows
from channel_processes import Kill, Peer, Work, consume, produce

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import NoChannelError
from collectives.experience.inspection import list_producer_rings, newest_batch
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from tests.waiting import until

FIELDS = (
    Field(name="obs", shape=(3,)),
    Field(name="done", dtype=torch.bool),
    Field(name="b", dtype=torch.bfloat16),
)


def schema(name):
    return ExperienceSchema(name, FIELDS)


def stats_of(name):
    return [ring.stats() for ring in list_producer_rings() if ring.schema.name == name]


def test_each_producer_ring_is_listed_with_its_counters():
    ring, consumer_endpoint = pair(schema("counted"), rows=4, slots=3, producer=2)
    other = ConsumerEndpoint(schema("counted"))
    ring.attach(other.endpoint)
    for version, rows in enumerate((4, 3, 2)):
        ring.put(random_rows(ring.schema, rows, version), version=10 * version, to=0)
    taken = consumer_endpoint.take(LIMIT_S)
    before_s = time.monotonic()
    (stats,) = stats_of("counted")
    assert before_s <= stats.at_s <= time.monotonic()
    assert stats.schema == ring.schema
    assert (stats.producer, stats.alive, stats.rows, stats.slots) == (2, True, 4, 3)
    assert (stats.committed, stats.committed_rows, stats.committed_bytes) == (3, 9, 9 * (12 + 1 + 2))
    assert (stats.version, stats.in_use, stats.reposted) == (20, 3, 0)
    first, second = stats.consumers
    assert (first.found, first.backlog, first.untaken, first.lag) == (True, 3, 2, 20)
    assert (second.found, second.backlog, second.untaken, second.lag) == (False, 0, 0, 0)

    taken.release()  # visible at once, without a call of the producer
    (stats,) = stats_of("counted")
    assert (stats.in_use, stats.consumers[0].backlog, stats.consumers[0].lag) == (2, 2, 10)
    consumer_endpoint.close()
    ring.update()
    (stats,) = stats_of("counted")
    assert stats.reposted == 2
    assert [consumer.backlog for consumer in stats.consumers] == [2]


def test_reserved_and_waiting_slots_are_in_use():
    ring = ProducerRing(schema("waiting"), rows=1, slots=3)
    reservation = ring.reserve()
    ring.reserve().commit(version=0)
    assert stats_of("waiting")[0].in_use == 2
    reservation.cancel()
    assert stats_of("waiting")[0].in_use == 1


def test_time_spent_waiting_for_a_slot_is_counted_while_it_passes():
    ring, consumer_endpoint = pair(schema("blocked"), rows=1, slots=1)
    ring.reserve().commit(version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    thread = threading.Thread(target=lambda: ring.reserve(timeout_s=LIMIT_S).cancel())
    thread.start()
    until(lambda: stats_of("blocked")[0].blocked_s >= 0.05)
    batch.release()
    thread.join(LIMIT_S)
    after = [stats_of("blocked")[0].blocked_s for _ in range(2)]
    assert after[0] == after[1] >= 0.05


def test_a_producer_that_has_ended_is_listed_while_a_consumer_has_its_file():
    work = Work(schema("ended"), slots=4, batches=9, kill=Kill("committed", 3))
    consumer_endpoint = ConsumerEndpoint(work.schema)
    producer = Peer(produce, work, [consumer_endpoint.endpoint])
    producer.send("go")
    held = [consumer_endpoint.take(LIMIT_S) for _ in range(3)]
    while not producer.over:
        producer.receive(LIMIT_S)
    (stats,) = stats_of("ended")
    assert (stats.alive, stats.committed, stats.in_use) == (False, 3, 3)
    held.clear()
    assert consumer_endpoint.take(LIMIT_S) is None
    assert stats_of("ended") == []
    producer.end()


def test_the_newest_batch_is_dumped_as_it_was_committed():
    first, _ = pair(schema("dumped"), rows=4, producer=0)
    second, _ = pair(schema("dumped"), rows=4, producer=5)
    rows = random_rows(first.schema, 3, 1)
    first.put(random_rows(first.schema, 4, 0), version=1)
    second.reserve(2).commit(version=1)
    second.put(rows, version=7)
    first.reserve().cancel()
    dump = newest_batch("dumped")
    assert (dump.producer, dump.sequence, dump.version, dump.batch.num_rows) == (5, 2, 7, 3)
    for name in ("producer", "sequence", "version"):
        assert dump.batch.schema.metadata[f"rayagi.{name}".encode()] == str(getattr(dump, name)).encode()
    assert dump.batch["obs"].to_numpy_ndarray().tobytes() == bits(rows["obs"])
    assert dump.batch["done"].to_numpy().tobytes() == bits(rows["done"])
    assert dump.batch["b"].to_numpy().tobytes() == bits(rows["b"])


def test_a_batch_that_is_being_overwritten_is_not_dumped():
    ring, consumer_endpoint = pair(schema("overwritten"), rows=1, slots=1)
    ring.put(random_rows(ring.schema, 1, 0), version=0)
    consumer_endpoint.take(LIMIT_S).release()
    assert newest_batch("overwritten").sequence == 1
    reservation = ring.reserve()
    with pytest.raises(NoChannelError, match="no slot of it holds a batch now"):
        newest_batch("overwritten")
    reservation.commit(version=1)
    assert newest_batch("overwritten").sequence == 2


def test_dumps_of_a_busy_channel_are_consistent():
    numbers = ExperienceSchema("torn", (Field(name="number", dtype=torch.int64, shape=(512,)),))
    ring, consumer_endpoint = pair(numbers, rows=16, slots=2)
    over = threading.Event()

    def exchange():
        while not over.is_set():
            reservation = ring.reserve(timeout_s=LIMIT_S)
            reservation["number"].fill_(len(done) + 1)
            done.append(reservation.commit(version=len(done)))
            consumer_endpoint.take(LIMIT_S).release()

    done, found = [], []
    (file,) = [one for one in list_producer_rings() if one.schema.name == "torn"]
    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        while len({dump.sequence for dump in found}) < 10:
            found += [dump for dump in [file.newest()] if dump]
    finally:
        over.set()
        thread.join(LIMIT_S)
    for dump in found:
        assert {*dump.batch["number"].to_numpy_ndarray().reshape(-1).tolist()} == {dump.sequence}


def test_the_error_for_a_missing_channel_names_the_live_ones():
    ring = ProducerRing(schema("empty"), rows=1)
    with pytest.raises(NoChannelError, match=r"'nothing': there is none: live channels of yours are .*empty"):
        newest_batch("nothing")
    with pytest.raises(NoChannelError, match="no slot of it holds a batch now"):
        newest_batch("empty")
    ring.close()


def test_consumers_of_other_processes_are_listed_with_their_process():
    work = Work(schema("apart"))
    consumer = Peer(consume, work)
    ring = ProducerRing(work.schema, rows=1)
    ring.attach(consumer.wait_for("endpoint"))
    until(lambda: stats_of("apart")[0].consumers[0].found)
    (stats,) = stats_of("apart")
    assert stats.consumers[0].pid == consumer.process.pid
    consumer.end()
