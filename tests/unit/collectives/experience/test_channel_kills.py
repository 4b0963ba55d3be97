"""Producers and consumers that are killed anywhere, and replaced: every committed row is released once.

The only exception: batches of a dead producer to which no consumer was attached that is alive.
"""

import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
import torch
from channel_cases import DTYPES, LIMIT_S, take_all
from channel_processes import Kill, Peer, Work, consume, produce
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from collectives.experience import file_layout
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelError
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

PRODUCER_PLACES = ("reserved", "half written", "committed")
CONSUMER_PLACES = ("taken", "read", "released")
NUMBERS = ExperienceSchema("numbers", (Field(name="a", dtype=torch.int64), Field(name="b", shape=(3,))))


@dataclass
class Group:
    """Peers that are started, and replaced when they are killed; and their reports."""

    producers: list[Peer] = field(default_factory=list)
    consumers: list[Peer] = field(default_factory=list)
    files: dict[int, SharedFile] = field(default_factory=dict)

    def consumer(self, work):
        end = Peer(consume, work)
        self.consumers.append(end)
        endpoint = end.wait_for("endpoint")
        for producer in self.producers if endpoint else ():
            producer.send("attach", endpoint)

    def producer(self, work):
        work = replace(work, origin=len(self.producers) + 1)
        consumer_endpoints = [end.wait_for("endpoint") for end in self.consumers]
        end = Peer(produce, work, [endpoint for endpoint in consumer_endpoints if endpoint])
        self.producers.append(end)
        endpoint = end.wait_for("endpoint")
        with suppress(ChannelError):  # it may be killed before it starts
            if endpoint:
                self.files[work.origin] = SharedFile.open(work.schema.name, endpoint, file_layout.RING_MAGIC)
        end.send("go")

    def run(self, consumers, producers):
        """Start all peers, replace each killed one by one that is not killed, until all are done."""
        try:
            for work in consumers:
                self.consumer(work)
            for work in producers:
                self.producer(work)
            last_report, num_reports = time.monotonic(), 0
            replaced, notified = set(), set()
            is_over = False  # one may be killed before this loop begins, and is replaced in it
            while not is_over:
                for end in [*self.consumers, *self.producers]:
                    end.receive(0.001)
                    if end.over and end not in replaced and not end.all_of("left") + end.all_of("drained"):
                        assert end.work.kill is not None, self.state()
                        replaced.add(end)
                        start = self.consumer if end in self.consumers else self.producer
                        start(replace(end.work, kill=None, seed=end.work.seed + 1))
                came = sum(len(end.reports) for end in [*self.consumers, *self.producers])
                if came != num_reports:
                    last_report, num_reports = time.monotonic(), came
                # Without any report, not in all: the machine may be busy, or stand still for a while.
                assert time.monotonic() < last_report + 2 * LIMIT_S, self.state()
                if all(end.over for end in self.producers):
                    for end in {*self.consumers} - notified:
                        end.send("last")
                    notified.update(self.consumers)
                is_over = all(end.over for end in self.consumers)
        finally:
            for end in [*self.consumers, *self.producers]:
                end.end()

    def state(self):
        return [
            (end.work.kill, end.over, end.process.exitcode, end.reports[-2:])
            for end in [*self.producers, *self.consumers]
        ]

    def check(self):
        """Every committed batch was read as written and released once, or lost with a dead producer."""
        sent, readings, once, perhaps = {}, [], Counter(), set()
        for producer in self.producers:
            for number, count, content in producer.all_of("commits"):
                sent[producer.work.origin, number] = (count, content)
        for consumer in self.consumers:
            readings += consumer.all_of("releases")
            done = [*consumer.all_of("released")]
            undone = [number for number, *_ in consumer.all_of("releases")[len(done) :]]
            assert len(undone) <= 1
            if undone and consumer.work.kill.place == "released":  # killed right after the release
                done += undone
            elif undone and consumer.work.kill.place != "read":  # "read": killed right before it
                perhaps.update(undone)
            once.update(done)
        for number, count, content in readings:
            assert sent[number] == (count, content)
        assert [number for number, times in once.items() if times > 1] == []
        for producer in self.producers:
            self.check_producer(
                producer, {number for origin, number in once if origin == producer.work.origin}, perhaps
            )

    def check_producer(self, producer, released, perhaps):
        origin = producer.work.origin
        committed = {*producer.all_of("committed")}
        begun = {number for number, *_ in producer.all_of("commits")}
        accounted = released | {number for other, number in perhaps if other == origin}
        assert released <= begun
        if producer.all_of("drained"):
            assert committed == begun == {*range(1, producer.work.batches + 1)}
            assert committed <= accounted
            return
        if origin not in self.files:  # killed before it was told to begin
            assert not begun
            return
        # What its own shared counter calls committed, whether or not it lived to report that.
        committed = {*range(1, self.files[origin].words[file_layout.COMMITTED] + 1)}
        assert begun >= committed >= {*producer.all_of("committed")}
        if self.has_surviving_consumer(origin):
            assert committed == accounted

    def has_surviving_consumer(self, origin):
        """Whether a consumer that was not killed was attached to this producer when it died."""
        words = self.files[origin].words
        shape = RingLayout(
            slots=words[file_layout.SLOTS],
            slot_stride=words[file_layout.STRIDE],
            schema_bytes=words[file_layout.SCHEMA_BYTES],
        )
        attached = {
            words[shape.queue_word(number) + file_layout.QUEUE_OWNER]
            for number in range(file_layout.MAX_CONSUMERS)
            if words[shape.queue_word(number) + file_layout.ATTACH_ACK]
        }
        return any(
            file_layout.word_of(end.all_of("endpoint")[0]) in attached
            for end in self.consumers
            if end.all_of("left")
        )


def check_run(consumers, producers):
    group = Group()
    group.run(consumers, producers)
    group.check()
    return group


@pytest.mark.parametrize("place", PRODUCER_PLACES)
def test_a_producer_killed_at_a_place_loses_nothing_that_it_committed(place):
    work = Work(NUMBERS, batches=12)
    group = check_run([work], [replace(work, kill=Kill(place, 5))])
    first, second = group.producers
    begun = [number for number, *_ in first.all_of("commits")]
    assert begun == [1, 2, 3, 4, 5][: 5 if place == "committed" else 4]
    released = {number for origin, number in group.consumers[0].all_of("released") if origin == 1}
    assert released == {*begun}  # also the one whose commit was not reported
    assert second.all_of("drained") == [None]
    assert group.consumers[0].all_of("left") == [([0], 0)]


@pytest.mark.parametrize("place", CONSUMER_PLACES)
def test_what_a_consumer_had_that_is_killed_at_a_place_is_posted_again_unless_it_was_released(place):
    work = Work(NUMBERS, batches=12, slots=3)
    group = check_run([replace(work, kill=Kill(place, 4))], [work])
    first, second = group.consumers
    done = [number for _, number in first.all_of("released")]
    done += [first.all_of("releases")[-1][0][1]] if place == "released" else []
    again = [number for _, number in second.all_of("released")]
    assert sorted(done + again) == list(range(1, 13))
    assert group.files[1].words[file_layout.REPOSTED] >= 1


def test_what_was_released_just_before_its_consumer_died_is_not_posted_again():
    ring = ProducerRing(NUMBERS, rows=1, slots=4)
    consumer = Peer(consume, Work(NUMBERS, keep=0, kill=Kill("released", 2)))
    ring.attach(consumer.wait_for("endpoint"))
    for number in range(4):
        ring.reserve().commit(version=number)
    while not consumer.over:  # no call of the producer meanwhile
        consumer.receive(LIMIT_S)
    successor = ConsumerEndpoint(NUMBERS)
    ring.attach(successor.endpoint)
    assert [batch.sequence for batch in take_all(successor)] == [3, 4]
    consumer.end()


EXITS = """
import torch
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.schema import ExperienceSchema, Field
fields = (Field(name="a", dtype=torch.int64), Field(name="b", shape=(3,)))
consumer = ConsumerEndpoint(ExperienceSchema("numbers", fields))
print(consumer.endpoint, flush=True)
held = consumer.take(30.0)
leaked = consumer.take(30.0)
tensor = leaked["b"]
leaked.release()
"""


def test_what_an_interpreter_holds_when_it_exits_is_posted_again():
    ring = ProducerRing(NUMBERS, rows=1, slots=4)
    command = [sys.executable, "-c", EXITS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ring.attach(process.stdout.readline().strip())
        for number in range(2):
            ring.reserve().commit(version=number)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in errors
    ring.update()
    assert ring.waiting() == [1, 2]


@pytest.mark.parametrize("line", range(40, 400, 45))
def test_a_producer_is_killed_at_any_line_of_its_code(line):
    work = Work(NUMBERS, batches=8)
    check_run([work], [replace(work, kill=Kill("line", line))])


@pytest.mark.parametrize("line", range(40, 400, 45))
def test_a_consumer_is_killed_at_any_line_of_its_code(line):
    work = Work(NUMBERS, batches=8)
    check_run([replace(work, kill=Kill("line", line))], [work])


@pytest.mark.slow
@pytest.mark.parametrize("lines", [range(begin, begin + 100) for begin in range(1, 600, 100)], ids=str)
def test_a_peer_is_killed_at_each_line_of_its_code(lines):
    work = Work(NUMBERS, batches=8)
    for line in lines:
        check_run([work], [replace(work, kill=Kill("line", line))])
        check_run([replace(work, kill=Kill("line", line))], [work])


def shapes_of(columns):
    return ExperienceSchema(
        "random",
        tuple(
            Field(name=f"f{place}", dtype=dtype, shape=shape) for place, (dtype, shape) in enumerate(columns)
        ),
    )


columns = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3).map(tuple)),
    min_size=1,
    max_size=5,
)
instants = st.builds(Kill, after_s=st.floats(0.001, 0.15))


def kills(places):
    lines = st.builds(Kill, st.just("line"), st.integers(1, 1500))
    return st.none() | st.builds(Kill, st.sampled_from(places), st.integers(1, 12)) | instants | lines


@st.composite
def groups(draw, most_peers, most_batches):
    work = Work(draw(columns.map(shapes_of)), rows=draw(st.integers(1, 8)))
    pauses = st.sampled_from((0.0, 0.0, 0.002, 0.01))
    consumers = [
        replace(
            work,
            kill=draw(kills(CONSUMER_PLACES)),
            keep=draw(st.integers(0, 2)),
            pause_s=draw(pauses),
            seed=draw(seeds),
        )
        for _ in range(draw(st.integers(1, most_peers)))
    ]
    producers = [
        replace(
            work,
            producer=producer,
            slots=draw(st.integers(1, 5)),
            credit=draw(st.none() | st.integers(1, 3)),
            batches=draw(st.integers(1, most_batches)),
            kill=draw(kills(PRODUCER_PLACES)),
            pause_s=draw(pauses),
            seed=draw(seeds),
        )
        for producer in range(draw(st.integers(1, most_peers)))
    ]
    return consumers, producers


seeds = st.integers(0, 2**31)
unhurried = {
    "phases": (Phase.generate,),
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=12, **unhurried)
@given(groups(most_peers=2, most_batches=15))
def test_any_peers_killed_at_any_time_lose_and_repeat_nothing(group):
    check_run(*group)


@pytest.mark.slow
@settings(max_examples=150, **unhurried)
@given(groups(most_peers=4, most_batches=60))
def test_many_peers_killed_at_any_time_lose_and_repeat_nothing(group):
    check_run(*group)
