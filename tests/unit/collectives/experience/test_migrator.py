"""Consumers attach, close, die and are replaced: every transfer is consumed once and whole."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from collectives.experience.batcher import Batcher
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.directory import ConsumerAnnouncement, consumer_key
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.migrator import Migrator
from collectives.experience.packer import ChannelPlan
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from collectives.rendezvous import host_identity
from tests.unit.collectives.experience.file_directory import FileDirectory
from tests.unit.forkserver import context

LIMIT_S = 20.0
NAME = "experience"
PLAN = ChannelPlan(
    (
        ExperienceSchema("counts", (Field(name="count", dtype=torch.int64),)),
        ExperienceSchema("squares", (Field(name="square", dtype=torch.int64),)),
    )
)


@pytest.fixture
def directory(tmp_path):
    return FileDirectory(tmp_path / "directory")


def send(dispenser, count):
    rows = dispenser.open(LIMIT_S)
    rows["count"].fill_(count)
    rows["square"].fill_(count**2)
    dispenser.send(version=count)


def take(batcher, timeout_s=LIMIT_S):
    with batcher.next(timeout_s) as experience:
        (count,) = experience["count"].tolist()
        assert experience["square"].tolist() == [count**2]
        return count


def consume(folder, index, record, die_at, half):
    """Write each count to a file before its release. Kill the process at number ``die_at``, in mid-release if ``half``."""
    torch.set_num_threads(1)
    with Batcher(PLAN, rows=1) as batcher, open(record, "a", buffering=1) as file:
        batcher.announce(FileDirectory(folder), NAME, index)
        number = 0
        while (experience := batcher.next(LIMIT_S)) is not None:
            number += 1
            with experience:
                if number == die_at and not half:
                    os.kill(os.getpid(), signal.SIGKILL)
                print(*experience["count"].tolist(), file=file)
                if number == die_at:
                    experience.tensors = {}
                    (transfer,) = experience._transfers
                    transfer._parts[0].release()
                    os.kill(os.getpid(), signal.SIGKILL)


def pump_until(dispenser, is_so):
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        dispenser.progress()


def start(target, *arguments):
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def finish(*processes):
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0


def counts_in(record):
    return [int(line) for line in Path(record).read_text().split()]


def test_the_last_announcement_of_a_key_counts(tmp_path):
    one, other = FileDirectory(tmp_path / "d"), FileDirectory(tmp_path / "d")
    assert other.announced("consumers/") == {}
    one.announce("consumers/a/0", "first")
    one.announce("consumers/a/0", "second")
    one.announce("board", "else")
    assert other.announced("consumers/") == {"consumers/a/0": "second"}


def test_a_consumer_is_announced_as_text():
    consumer = ConsumerAnnouncement("host/1", ("/proc/1/fd/3", "/proc/1/fd/4"), "a1", node="b2")
    assert ConsumerAnnouncement.from_text(consumer.text()) == consumer


def test_new_consumers_are_discovered(directory):
    with Dispenser(PLAN, rows=1, producer=0) as dispenser, Batcher(PLAN, rows=1) as batcher:
        Migrator(dispenser, directory, NAME)
        send(dispenser, 5)
        assert dispenser.consumers() == {}
        batcher.announce(directory, NAME, 3)
        pump_until(dispenser, lambda: 3 in dispenser.consumers())
        assert take(batcher) == 5


def test_a_fixed_consumer_is_waited_for_although_another_is_idle(directory):
    with (
        Dispenser(PLAN, rows=1, producer=3) as dispenser,
        Batcher(PLAN, rows=1) as even,
        Batcher(PLAN, rows=1) as odd,
    ):
        Migrator(dispenser, directory, NAME, consumers=2)
        even.announce(directory, NAME, 0)
        send(dispenser, 1)
        assert dispenser.drain(timeout_s=0.2) == 1
        odd.announce(directory, NAME, 1)
        assert dispenser.drain(timeout_s=0.2) == 1
        assert take(odd) == 1
        assert dispenser.drain(LIMIT_S) == 0
        with pytest.raises(ChannelTimeoutError):
            even.next(timeout_s=0.0)


def test_consumers_that_wait_for_each_other_all_get_rows_from_producers_with_one_slot(directory):
    """Else the first that is attached, or has the lowest number, would hold all slots while it waits for the other."""
    with (
        Dispenser(PLAN, rows=1, producer=0, slots=1) as even,
        Dispenser(PLAN, rows=1, producer=1, slots=1) as odd,
        Batcher(PLAN, rows=1) as first,
        Batcher(PLAN, rows=1) as second,
    ):
        for dispenser in (even, odd):
            Migrator(dispenser, directory, NAME, together=2)
        first.announce(directory, NAME, 0)
        for count, dispenser in enumerate((even, odd)):
            send(dispenser, count)
            assert dispenser.drain(timeout_s=0.1) == 1
        with pytest.raises(ChannelTimeoutError):
            first.next(timeout_s=0.0)
        second.announce(directory, NAME, 1)
        for dispenser in (even, odd):
            pump_until(dispenser, lambda: sum(dispenser.consumers().values()) == 1)  # noqa: B023  called here
        with first.next(LIMIT_S) as one, second.next(LIMIT_S) as other:
            assert (one["count"].tolist(), other["count"].tolist()) == ([0], [1])


def test_a_consumer_without_all_its_rows_gives_back_copied_ones_while_others_hold_their_share_of_slots(
    directory,
):
    with (
        Dispenser(PLAN, rows=3, producer=0, slots=2) as dispenser,
        Batcher(PLAN, rows=2, consumers=2) as first,
        Batcher(PLAN, rows=2, consumers=2) as second,
    ):
        Migrator(dispenser, directory, NAME, together=2)
        first.announce(directory, NAME, 0)
        second.announce(directory, NAME, 1)
        for count in (1, 2):
            send(dispenser, count)
        with first.next(LIMIT_S) as experience:
            assert experience["count"].tolist() == [1, 1]
        with pytest.raises(ChannelTimeoutError):
            dispenser.open(timeout_s=0.0)
        with pytest.raises(ChannelTimeoutError):
            first.next(timeout_s=0.0)
        send(dispenser, 3)
        with first.next(LIMIT_S) as experience, second.next(LIMIT_S) as other:
            assert (experience["count"].tolist(), other["count"].tolist()) == ([1, 3], [2, 2])


def test_a_consumer_that_was_announced_and_is_gone_is_no_error(directory):
    with Dispenser(PLAN, rows=1, producer=0) as dispenser, Batcher(PLAN, rows=1) as batcher:
        Migrator(dispenser, directory, NAME)
        directory.announce(
            consumer_key(NAME, 0), ConsumerAnnouncement(host_identity(), ("/proc/1/fd/999",) * 2, "a1").text()
        )
        send(dispenser, 1)
        batcher.announce(directory, NAME, 0)
        assert dispenser.drain(timeout_s=0.3) == 1
        assert take(batcher) == 1


def test_a_consumer_that_cannot_be_attached_for_a_moment_is_tried_again(directory, monkeypatch, caplog):
    attach, failures = Dispenser.attach_route, [ChannelError("counts", "too many files are open")] * 2

    def fail_twice(dispenser, index, route):
        if failures:
            raise failures.pop()
        attach(dispenser, index, route)

    monkeypatch.setattr(Dispenser, "attach_route", fail_twice)
    with Dispenser(PLAN, rows=1, producer=0) as dispenser, Batcher(PLAN, rows=1) as batcher:
        Migrator(dispenser, directory, NAME)
        batcher.announce(directory, NAME, 0)
        send(dispenser, 1)
        pump_until(dispenser, lambda: 0 in dispenser.consumers())
        assert take(batcher) == 1
    assert caplog.text.count("too many files are open") == 1  # said once, not at each try


def connect_and_die(endpoint):
    ring = ProducerRing(PLAN.groups[0], rows=1)
    ring.attach(endpoint)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_producer_that_dies_before_its_connect_request_is_accepted_is_lost():
    with ConsumerEndpoint(PLAN.groups[0]) as consumer_endpoint:
        process = start(connect_and_die, consumer_endpoint.endpoint)
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
        assert consumer_endpoint.producers == ()
        assert consumer_endpoint.lost == [0]


def test_a_dispenser_that_closes_at_once_discovers_no_consumer(directory):
    """Transfers in flight are dropped: a restarted consumer neither gets them nor reports their producer as lost."""
    dispenser = Dispenser(PLAN, rows=1, producer=0)
    migrator = Migrator(dispenser, directory, NAME)
    with Batcher(PLAN, rows=1) as before:
        before.announce(directory, NAME, 0)
        pump_until(dispenser, lambda: 0 in dispenser.consumers())
        send(dispenser, 1)
    with Batcher(PLAN, rows=1) as restarted:
        restarted.announce(directory, NAME, 0)
        migrator._polled_s = float("-inf")  # due for the next poll
        dispenser.close(timeout_s=0.0)
        assert (restarted.producers, restarted.lost) == ((), [])


def test_a_consumer_on_another_host_that_cannot_be_reached_is_an_error_at_set_up(directory):
    with Dispenser(PLAN, rows=1, producer=0) as dispenser:
        Migrator(dispenser, directory, NAME)
        directory.announce(consumer_key(NAME, 0), ConsumerAnnouncement("elsewhere", ("a", "b"), "a1").text())
        with pytest.raises(SchemaError, match="consumer 0 is on another host"):
            dispenser.open(LIMIT_S)


@pytest.mark.parametrize("half", [False, True], ids=["nothing released", "half released"])
def test_a_killed_trainers_experience_goes_to_its_successor_whole_and_once(directory, tmp_path, half):
    folder, record = tmp_path / "directory", tmp_path / "record"
    victim = start(consume, folder, 0, record, 4, half)
    with Dispenser(PLAN, rows=1, producer=0, slots=3) as dispenser:
        Migrator(dispenser, directory, NAME, consumers=1)
        for count in range(6):
            send(dispenser, count)
        victim.join(LIMIT_S)
        assert victim.exitcode == -signal.SIGKILL
        heir = start(consume, folder, 0, record, None, False)
        for count in range(6, 20):
            send(dispenser, count)
        assert dispenser.drain(LIMIT_S) == 0
        assert dispenser.incomplete == half
    finish(heir)
    assert sorted(counts_in(record)) == list(range(20))


def test_what_a_killed_trainer_had_goes_to_the_other_trainer(directory, tmp_path):
    folder, record = tmp_path / "directory", tmp_path / "record"
    victim = start(consume, folder, 0, record, 3, False)
    with Dispenser(PLAN, rows=1, producer=0) as dispenser, Batcher(PLAN, rows=1) as other:
        Migrator(dispenser, directory, NAME)
        for count in range(4):
            send(dispenser, count)
        pump_until(dispenser, lambda: 0 in dispenser.consumers())
        other.announce(directory, NAME, 1)
        victim.join(LIMIT_S)
        pump_until(dispenser, lambda: dispenser.consumers().get(1) == 2)
        counts = counts_in(record)
        while len(counts) < 4:
            counts.append(take(other))
        assert dispenser.drain(LIMIT_S) == 0
        assert dispenser.rerouted == 2
    assert sorted(counts) == list(range(4))


def test_a_killed_producers_half_transfer_is_dropped_and_its_successor_is_not_taken_for_it(tmp_path):
    with Batcher(PLAN, rows=1) as batcher:
        victim = start(die_between_commits, batcher.endpoints)
        assert [take(batcher) for _ in range(2)] == [0, 1]
        victim.join(LIMIT_S)
        with pytest.raises(ChannelTimeoutError, match=r"producers \[0\] ended without closing"):
            batcher.next(timeout_s=0.3)
        with Dispenser(PLAN, rows=1, producer=0) as successor:
            successor.attach(0, batcher.endpoints)
            for count in range(10, 15):  # sequence numbers from 1 again: 3 was half there
                send(successor, count)
                assert take(batcher) == count
        assert (batcher.incomplete, batcher.repeated) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_trainers_killed_at_any_moment_lose_nothing_and_repeat_at_most_what_they_had_in_hand(tmp_path, seed):
    chance = random.Random(seed)
    folder, records = tmp_path / "directory", [tmp_path / "0", tmp_path / "1"]
    number, kills = 400, 4
    producers = [start(produce, folder, producer, number) for producer in range(2)]
    trainers = [start(consume, folder, index, records[index], None, False) for index in range(2)]
    for _ in range(kills):
        index = chance.randrange(2)
        num_lines = lines_in(records[index])
        deadline = time.monotonic() + LIMIT_S
        while lines_in(records[index]) < num_lines + chance.randrange(1, 20) and time.monotonic() < deadline:
            if not any(producer.is_alive() for producer in producers):
                break
        trainers[index].kill()
        trainers[index].join(LIMIT_S)
        trainers[index] = start(consume, folder, index, records[index], None, False)
    finish(*producers)  # every release has reached them
    for trainer in trainers:
        trainer.kill()
        trainer.join(LIMIT_S)
    counts = [count for record in records for count in counts_in(record)]
    assert set(counts) == {1000 * producer + count for producer in range(2) for count in range(number)}
    assert len(counts) - len(set(counts)) <= kills


def produce(folder, producer, number):
    with Dispenser(PLAN, rows=1, producer=producer, slots=3) as dispenser:
        Migrator(dispenser, FileDirectory(folder), NAME)
        for count in range(1000 * producer, 1000 * producer + number):
            send(dispenser, count)
            time.sleep(0.002)  # so that it lasts as long as the kills do
        assert dispenser.drain(LIMIT_S) == 0


def lines_in(record):
    return record.read_text().count("\n") if record.exists() else 0


def die_between_commits(endpoints):
    dispenser = Dispenser(PLAN, rows=1, producer=0)
    dispenser.attach(0, endpoints)
    for count in range(2):
        send(dispenser, count)
    # Batches of a ring that no consumer has mapped would be lost with it.
    pump_until(dispenser, lambda: dispenser.consumers() == {0: 0})
    dispenser.open(LIMIT_S)
    dispenser._reservations["counts"].commit(version=0)
    dispenser.rings[0].post(3, queue=0)
    os.kill(os.getpid(), signal.SIGKILL)
