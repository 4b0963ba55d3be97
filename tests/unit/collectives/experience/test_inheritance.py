"""What a killed producer had committed is read, once and whole: posted or not, by whichever consumer is alive."""

import gc
import os
import pickle
import signal
import socket
from collections import Counter

import pytest
import torch
from channel_cases import LIMIT_S
from channel_processes import Kill, Reporter

from collectives.experience import file_layout
from collectives.experience.batcher import Batcher
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.descriptors import send_descriptor
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.file_layout import FILE_PREFIX, SharedFile
from collectives.experience.packer import ChannelPlan
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from collectives.rendezvous import poll
from experiments.channels.kills import run_round
from tests.unit.forkserver import context

NUMBERS = ExperienceSchema("numbers", (Field(name="number", dtype=torch.int64),))
SQUARES = ExperienceSchema("squares", (Field(name="square", dtype=torch.int64),))
PLAN = ChannelPlan((NUMBERS, SQUARES))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def start(target, *arguments):
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def wait_until_killed(process):
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL


def commit_and_die(endpoints, before, after):
    """Commit some batches, attach with a credit of 1, commit others, and be killed."""
    ring = ProducerRing(NUMBERS, rows=1, slots=4, credit=1)
    for _ in range(before):
        ring.reserve().commit(version=0)
    for endpoint in endpoints:
        ring.attach(endpoint)
    for _ in range(after):
        ring.reserve().commit(version=0)
    die()


def take_all(consumer):
    sequences = []
    while (batch := consumer.take(LIMIT_S)) is not None:
        with batch:
            sequences.append(batch.sequence)
    return sequences


@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 3)])
def test_a_consumer_that_did_not_run_meanwhile_reads_all_that_two_producers_of_one_number_left(before, after):
    """With a credit of 1, two of the three were never posted."""
    consumer = ConsumerEndpoint(NUMBERS)
    for _ in range(2):
        wait_until_killed(start(commit_and_die, [consumer.endpoint], before, after))
    assert Counter(take_all(consumer)) == {1: 2, 2: 2, 3: 2}
    assert (consumer.lost, consumer.producers) == ([0, 0], ())


def post_and_die(first, second, batches):
    """Post batches to one consumer, attach another, and be killed once all but one of them are released."""
    ring = ProducerRing(NUMBERS, rows=1, slots=3)
    ring.attach(first)
    for _ in range(batches):
        ring.reserve().commit(version=0)
    ring.attach(second)
    poll(lambda: ring.drain(0.0) == 1 or None, LIMIT_S)
    die()


@pytest.mark.parametrize("batches", [3, 4, 5])
def test_a_batch_that_a_live_consumer_holds_is_no_other_consumers_however_many_were_posted_since(batches):
    """After four batches, a queue of four places has come round, and the next place is that of the held batch."""
    first, second = ConsumerEndpoint(NUMBERS), ConsumerEndpoint(NUMBERS)
    process = start(post_and_die, first.endpoint, second.endpoint, batches)
    held = first.take(LIMIT_S)
    for _ in range(1, batches):
        first.take(LIMIT_S).release()
    wait_until_killed(process)
    with pytest.raises(ChannelTimeoutError):  # it waits: the first may be killed before it releases the batch
        second.take(0.3)
    assert held.sequence == 1
    held.release()
    assert first.take(LIMIT_S) is None
    assert second.take(LIMIT_S) is None


def test_the_memory_of_a_killed_producer_goes_once_its_batches_are_released():
    def mappings():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return sum(f"{FILE_PREFIX}numbers" in line for line in maps)

    consumer = ConsumerEndpoint(NUMBERS)
    before = mappings()
    wait_until_killed(start(commit_and_die, [consumer.endpoint], 0, 2))
    held = [consumer.take(LIMIT_S), consumer.take(LIMIT_S)]
    assert consumer.producers == (0,)
    assert mappings() == before + 1
    while held:
        held.pop().release()
    assert consumer.producers == ()
    assert mappings() == before


def hold(pipe, number):
    """Take that many batches, report their sequence numbers, and hold them."""
    consumer = ConsumerEndpoint(NUMBERS)
    pipe.send(consumer.endpoint)
    held = [consumer.take(LIMIT_S) for _ in range(number)]
    pipe.send([batch.sequence for batch in held])
    pipe.recv()


def test_what_one_consumer_inherited_is_no_other_consumers_until_it_dies():
    ours, theirs = context.Pipe()
    holder = start(hold, theirs, 3)
    second = ConsumerEndpoint(NUMBERS)
    wait_until_killed(start(commit_and_die, [ours.recv(), second.endpoint], 0, 4))
    assert ours.recv() == [1, 3, 4]  # 1 was posted to it, 3 and 4 to nobody
    with second.take(LIMIT_S) as batch:
        assert batch.sequence == 2
    with pytest.raises(ChannelTimeoutError):  # not None: the holder may die
        second.take(timeout_s=0.2)
    holder.kill()
    assert take_all(second) == [1, 3, 4]
    assert second.lost == [0]


def test_what_a_consumer_left_that_closed_goes_to_another():
    first, second = ConsumerEndpoint(NUMBERS), ConsumerEndpoint(NUMBERS)
    wait_until_killed(start(commit_and_die, [first.endpoint, second.endpoint], 0, 4))
    with second.take(LIMIT_S) as batch:
        assert batch.sequence == 2
    taken = first.take(LIMIT_S)
    assert taken.sequence == 1
    first.close()
    taken.release()
    del taken
    assert take_all(second) == [3, 4]


def send_and_die(endpoints, line, pipe):
    """Send transfers of two channels with a credit of 1, killed at a line of the channels' code."""
    reporter = Reporter(pipe, Kill("line", line))
    dispenser = Dispenser(PLAN, rows=2, producer=0, slots=3, credit=1)
    dispenser.attach(0, endpoints)
    reporter.report("ring", dispenser.rings[0].endpoint)
    pipe.recv_bytes()
    for number in range(3):
        rows = dispenser.open(LIMIT_S)
        rows["number"].fill_(number)
        rows["square"].fill_(number**2)
        dispenser.send(version=number)
    die()


def check_killed_at(line):
    ours, theirs = context.Pipe()
    with Batcher(PLAN, rows=2) as batcher:
        process = start(send_and_die, batcher.endpoints, line, theirs)
        theirs.close()
        try:
            ring = SharedFile.open("numbers", pickle.loads(ours.recv_bytes())[1], file_layout.RING_MAGIC)
        except (EOFError, ConnectionResetError):  # killed before
            return
        ours.send_bytes(b"")
        wait_until_killed(process)
        found = []
        while batcher.producers or batcher.waiting:
            try:
                experience = batcher.next(timeout_s=0.0)
            except ChannelTimeoutError:
                continue
            with experience:
                assert torch.equal(experience["number"] ** 2, experience["square"])
                found.append(experience["number"].tolist())
        committed = ring.words[file_layout.COMMITTED]
        assert found == [[number] * 2 for number in range(committed)]


@pytest.mark.parametrize("line", range(1160, 2640, 120))
def test_a_transfer_of_a_killed_producer_is_read_whole_or_was_not_committed(line):
    check_killed_at(line)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(840, 2640, 300))
def test_a_producer_of_transfers_is_killed_anywhere(first):
    for line in range(first, first + 300, 7):
        check_killed_at(line)


@pytest.mark.parametrize("number", [4, 5])
def test_rows_of_killed_producers_are_read_once(number):
    found = run_round(number, seed=number)
    assert found.pop("committed") > 0
    assert found == {"lost": 0, "repeated": 0, "torn": 0, "unknown": 0}


def test_a_file_that_is_no_channel_is_refused_and_others_connect(caplog):
    consumer = ConsumerEndpoint(NUMBERS)
    token = consumer._file.words[file_layout.CONSUMER_TOKEN]
    with open(os.devnull) as file:
        send_descriptor(token, file.fileno())
    with socket.socket(socket.AF_UNIX) as silent:  # connects, and is closed with nothing sent
        silent.connect(f"\0rayagi-channel-{token:016x}")
    ring = ProducerRing(NUMBERS, rows=1)
    ring.attach(consumer.endpoint)
    assert consumer.producers == (0,)
    assert "a process sent a file that is no channel" in caplog.text


def test_a_forked_child_keeps_no_lock_of_its_parent():
    created = SharedFile.create("locked", 8)
    holder = SharedFile.receive("locked", os.dup(created.descriptor), 0)
    assert holder.try_lock()
    closed, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.read(closed, 1)  # until the parent is done
        os._exit(0)
    os.close(closed)
    try:
        holder.close()  # as if the parent had been killed
        other = SharedFile.receive("locked", os.dup(created.descriptor), 0)
        assert poll(lambda: other.try_lock() or None, LIMIT_S)  # once the child runs
    finally:
        os.close(told)
        os.waitpid(child, 0)
