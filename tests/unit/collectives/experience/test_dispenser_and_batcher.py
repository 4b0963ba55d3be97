"""From dispensers to batchers within one process: every row once, with its version, its producer and its ragged rows."""

import logging
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.experience.batcher import Batcher
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelTimeoutError, SchemaError
from collectives.experience.packer import ChannelPlan
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

LIMIT_S = 5.0

OBS = ExperienceSchema("obs", (Field(name="obs", shape=(3,)), Field(name="count", dtype=torch.int64)))
DONE = ExperienceSchema("done", (Field(name="done", dtype=torch.bool),))
FINALS = ExperienceSchema("finals", (Field(name="env", dtype=torch.int64), Field(name="last", shape=(3,))))


def plan_of():
    return ChannelPlan((OBS, DONE, FINALS), ragged=frozenset({"finals"}))


def send(dispenser, first, version, cut=()):
    """Rows that count up from ``first``; environments in ``cut`` have a true last observation."""
    rows = dispenser.open(LIMIT_S)
    counts = torch.arange(first, first + dispenser.rows)
    rows["count"].copy_(counts)
    rows["obs"].copy_(counts[:, None].expand(-1, 3))
    rows["done"].copy_(counts % 3 == 0)
    env = torch.tensor(cut, dtype=torch.int64)
    last = (first + env)[:, None].expand(-1, 3).float()
    return dispenser.send(version, {"finals": {"env": env, "last": last}} if cut else None)


def check(experience):
    """What each row must be, from its count; returns the counts."""
    counts = experience["count"]
    assert torch.equal(experience["obs"], counts[:, None].expand(-1, 3).float())
    assert torch.equal(experience["done"], counts % 3 == 0)
    finals = experience.ragged["finals"]
    assert torch.equal(finals["last"][:, 0].long(), counts[finals["env"]])
    return counts.tolist()


@pytest.fixture
def pair():
    opened = []

    def open_pair(rows, wanted, slots=4, producers=1):
        batcher = Batcher(plan_of(), rows=wanted)
        dispensers = [
            Dispenser(plan_of(), rows=rows, producer=producer, slots=slots) for producer in range(producers)
        ]
        opened.extend([batcher, *dispensers])
        for dispenser in dispensers:
            dispenser.attach(0, batcher.endpoints)
        return (*dispensers, batcher)

    yield open_pair
    for end in opened:
        end.close()


def test_a_transfer_of_the_wanted_rows_is_read_in_place(pair):
    dispenser, batcher = pair(rows=4, wanted=4)
    assert send(dispenser, 0, version=7, cut=[1, 3]) == 1
    with batcher.next(LIMIT_S) as experience:
        assert check(experience) == [0, 1, 2, 3]
        assert experience.ragged["finals"]["env"].tolist() == [1, 3]
        assert experience.versions.tolist() == [7] * 4
        assert experience.producers.tolist() == [0] * 4
        assert [ring.unreleased() for ring in dispenser.rings] == [{1}] * 3
    assert dispenser.drain(LIMIT_S) == 0


def test_what_is_in_place_is_the_producers_memory(pair):
    dispenser, batcher = pair(rows=2, wanted=2)
    written = dispenser.open(LIMIT_S)["obs"]
    written.fill_(1.0)
    dispenser.send(version=0)
    with batcher.next(LIMIT_S) as experience:
        written.fill_(2.0)  # no producer does so: it shows that nothing was copied
        assert experience["obs"].tolist() == [[2.0] * 3] * 2


def test_slices_hold_their_transfer_until_the_last_one_is_released(pair):
    dispenser, batcher = pair(rows=5, wanted=2)
    send(dispenser, 0, version=1, cut=[0, 1, 2, 4])
    send(dispenser, 5, version=2, cut=[0])
    slices = [batcher.next(LIMIT_S) for _ in range(5)]
    assert [check(one) for one in slices] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [one.ragged["finals"]["env"].tolist() for one in slices] == [[0, 1], [0], [0, 1], [], []]
    assert slices[2].versions.tolist() == [1, 2]
    for one, left in zip(slices, [{1, 2}, {1, 2}, {2}, {2}, set()], strict=True):
        one.release()
        dispenser.progress()
        assert dispenser.rings[0].unreleased() == left


def test_stacks_are_in_memory_that_is_used_again(pair):
    dispenser, batcher = pair(rows=2, wanted=4)
    places = []
    for first in (0, 4, 8):
        send(dispenser, first, version=0, cut=[1])
        send(dispenser, first + 2, version=0, cut=[0])
        with batcher.next(LIMIT_S) as experience:
            assert check(experience) == list(range(first, first + 4))
            assert experience.ragged["finals"]["env"].tolist() == [1, 2]
            places.append(experience["obs"].data_ptr())
    assert len(set(places)) == 1


def test_two_stacks_at_once_do_not_share_memory(pair):
    dispenser, batcher = pair(rows=1, wanted=2)
    for first in range(4):
        send(dispenser, first, version=0)
    one, other = batcher.next(LIMIT_S), batcher.next(LIMIT_S)
    assert (check(one), check(other)) == ([0, 1], [2, 3])


def test_more_rows_than_a_producer_has_slots_for_do_not_wait_for_each_other(pair):
    dispenser, batcher = pair(rows=1, wanted=3, slots=1)
    for first in range(3):
        send(dispenser, first, version=0, cut=[0])
        if first < 2:
            with pytest.raises(ChannelTimeoutError):
                batcher.next(timeout_s=0.0)
    with batcher.next(LIMIT_S) as experience:
        assert check(experience) == [0, 1, 2]


def test_a_round_has_one_transfer_of_each_producer_in_their_order(pair):
    first, second, batcher = pair(rows=2, wanted=4, producers=2)
    send(second, 100, version=1, cut=[0])
    send(second, 102, version=2)
    send(first, 0, version=1, cut=[1])
    with batcher.round([0, 1], LIMIT_S) as experience:
        assert check(experience) == [0, 1, 100, 101]
        assert experience.producers.tolist() == [0, 0, 1, 1]
        assert experience.ragged["finals"]["env"].tolist() == [1, 2]
    with pytest.raises(ChannelTimeoutError, match=r"no batch came from producers 0 \(waited"):
        batcher.round([0, 1], timeout_s=0.1)
    send(first, 2, version=2)
    with batcher.round([0, 1], LIMIT_S) as experience:
        assert check(experience) == [2, 3, 102, 103]


def test_a_round_of_one_producer_is_read_in_place(pair):
    dispenser, batcher = pair(rows=2, wanted=9)
    send(dispenser, 0, version=0)
    with batcher.round([0], LIMIT_S) as experience:
        assert check(experience) == [0, 1]
        assert dispenser.rings[0].unreleased() == {1}


def test_what_is_stale_when_its_turn_comes_is_dropped_and_counted(pair):
    dispenser, batcher = pair(rows=2, wanted=2)
    for first, version in [(0, 3), (2, 9), (4, 2), (6, 10)]:
        send(dispenser, first, version)
    fresh = lambda version: version >= 5  # noqa: E731
    with batcher.next(LIMIT_S, fresh) as experience:
        assert check(experience) == [2, 3]
    with batcher.next(LIMIT_S, fresh) as experience:
        assert check(experience) == [6, 7]
    assert batcher.stale_rows == 4
    assert dispenser.drain(LIMIT_S) == 0


def test_next_returns_none_when_all_producers_have_closed(pair):
    dispenser, batcher = pair(rows=2, wanted=3)
    for first in (0, 2):
        send(dispenser, first, version=0)
    with batcher.next(LIMIT_S) as experience:
        assert check(experience) == [0, 1, 2]
    dispenser.close()
    assert batcher.next(LIMIT_S) is None
    assert batcher.left_rows == 1


def test_what_is_cancelled_is_never_sent(pair):
    dispenser, batcher = pair(rows=2, wanted=2, slots=1)
    dispenser.open(LIMIT_S)["count"].fill_(99)
    dispenser.cancel()
    send(dispenser, 0, version=0)
    with batcher.next(LIMIT_S) as experience:
        assert check(experience) == [0, 1]


def test_two_trainers_share_the_work_by_backlog_and_no_transfer_is_split(pair):
    dispenser, batcher = pair(rows=1, wanted=1)
    with Batcher(plan_of(), rows=1) as other:
        dispenser.attach(1, other.endpoints)
        for first in range(4):
            send(dispenser, first, version=0, cut=[0])
        assert dispenser.consumers() == {0: 2, 1: 2}
        counts = []
        for one in (batcher, other, batcher, other):
            with one.next(LIMIT_S) as experience:
                counts += check(experience)
        assert sorted(counts) == [0, 1, 2, 3]


def test_what_a_trainer_that_closed_had_not_taken_goes_to_another_whole(pair):
    dispenser, batcher = pair(rows=1, wanted=1)
    for first in range(3):
        send(dispenser, first, version=0)
    with batcher.next(LIMIT_S) as experience:
        assert check(experience) == [0]
    batcher.close()
    with Batcher(plan_of(), rows=1) as successor:
        dispenser.attach(0, successor.endpoints)
        for count in (1, 2):
            with successor.next(LIMIT_S) as experience:
                assert check(experience) == [count]
    assert dispenser.incomplete == 0


def test_nothing_open_is_refused(pair):
    dispenser, _ = pair(rows=1, wanted=1)
    with pytest.raises(ValueError, match="call open"):
        dispenser.send(version=0)


def test_wrong_ragged_rows_are_refused_and_leave_everything_as_it_was(pair):
    dispenser, batcher = pair(rows=2, wanted=2, slots=1)
    dispenser.open(LIMIT_S)
    env, last = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3)
    for wrong, message in [
        ({"final": {"env": env, "last": last}}, "ragged rows of \\['final'\\]"),
        ({"finals": {"env": env, "last": last[:, :2]}}, "last is"),
        ({"finals": {"env": env.repeat(3), "last": last.repeat(3, 1)}}, "3 rows: this ring's slots hold 2"),
    ]:
        with pytest.raises(SchemaError, match=message):
            dispenser.send(version=0, ragged=wrong)
    send(dispenser, 0, version=0, cut=[0])
    with batcher.next(LIMIT_S) as experience:
        assert check(experience) == [0, 1]


def test_the_timeout_names_the_slow_consumer(pair):
    dispenser, _ = pair(rows=1, wanted=1, slots=1)
    send(dispenser, 0, version=0)
    with pytest.raises(ChannelTimeoutError, match=r"holds 1 \(waited 0\.[1-4]"):
        dispenser.open(timeout_s=0.1)


def test_another_plan_at_the_consumer_is_refused():
    plan = ChannelPlan((OBS,))
    with (
        Batcher(plan, rows=1) as batcher,
        Dispenser(plan_of(), rows=1, producer=0) as dispenser,
        pytest.raises(SchemaError, match="1 endpoint where 3 channels"),
    ):
        dispenser.attach(0, batcher.endpoints)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    wanted=st.integers(1, 12),
    slots=st.integers(1, 3),
    script=st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 4))), min_size=1, max_size=20),
)
def test_every_row_arrives_once_whatever_is_sliced_and_stacked(rows, wanted, slots, script):
    counts, sent = [], []

    def take_what_is_there():
        while True:
            try:
                with batcher.next(timeout_s=0.0) as experience:
                    counts.extend(zip(experience.producers.tolist(), check(experience), strict=True))
                    versions = [count // 1000 for count in experience["count"].tolist()]
                    assert all(
                        own <= other
                        for own, other in zip(experience.versions.tolist(), versions, strict=True)
                    )
            except ChannelTimeoutError:
                return

    with Batcher(plan_of(), rows=wanted) as batcher:
        dispensers = [Dispenser(plan_of(), rows=rows, producer=index, slots=slots) for index in range(3)]
        for dispenser in dispensers:
            dispenser.attach(0, batcher.endpoints)
        for turn, (who, cut) in enumerate(script):
            take_what_is_there()
            send(dispensers[who], 1000 * turn, turn, sorted(env for env in cut if env < rows))
            sent.append((who, turn))
        take_what_is_there()
        for dispenser in dispensers:
            dispenser.close()
        assert batcher.next(LIMIT_S) is None
        left = batcher.left_rows
    expected = {(who, 1000 * turn + row) for who, turn in sent for row in range(rows)}
    assert len(counts) == len(set(counts))
    assert set(counts) <= expected
    assert len(counts) + left == len(expected)
    assert left < wanted
    for who in range(3):
        own = [count for whose, count in counts if whose == who]
        assert own == sorted(own)


def test_nothing_is_reported_as_leaked(pair, caplog):
    with caplog.at_level(logging.WARNING):
        dispenser, batcher = pair(rows=3, wanted=2)
        for first in (0, 3):
            send(dispenser, first, version=0, cut=[0, 2])
        for _ in range(3):
            with batcher.next(LIMIT_S) as experience:
                check(experience)
        assert dispenser.drain(LIMIT_S) == 0
    assert caplog.records == []


class Cudart:
    """Stands in for torch's: notes what is page-locked."""

    def __init__(self, status=0):
        self.status, self.locked = status, {}

    def cudaHostRegister(self, address, size, flags):
        self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


@pytest.mark.parametrize(("device", "rings"), [("cpu", 0), ("cuda", 3)])
def test_rings_are_page_locked_where_the_consumers_device_is_cuda(device, rings, monkeypatch):
    """Whether this machine has a GPU does not matter; the memory of a ring is released with its link."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with (
        Batcher(plan_of(), rows=4, device=torch.device(device)) as batcher,
        Dispenser(plan_of(), rows=4, producer=0) as dispenser,
    ):
        dispenser.attach(0, batcher.endpoints)
        send(dispenser, 0, version=7)
        with batcher.next(LIMIT_S) as experience:
            assert check(experience) == [0, 1, 2, 3]
            places = {*cudart.locked.items()}
            assert len(places) == rings
            obs = experience["obs"]
            inside = [
                at <= obs.data_ptr() and obs.data_ptr() + obs.nbytes <= at + size for at, size in places
            ]
            assert sum(inside) == min(1, rings)
            del obs
        dispenser.close()
        assert batcher.next(LIMIT_S) is None
        assert cudart.locked == {}


def test_a_driver_that_refuses_to_page_lock_is_reported_once_per_ring(monkeypatch, caplog):
    cudart = Cudart(status=1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    ring = ProducerRing(OBS, rows=1)
    with ConsumerEndpoint(OBS, page_locked=True) as consumer:
        ring.attach(consumer.endpoint)
        ring.reserve().commit(version=0)
        consumer.take(LIMIT_S).release()
    assert caplog.text.count("is not page-locked (error 1)") == 1


def test_batches_that_wait_are_in_the_order_of_their_commits():
    ring = ProducerRing(OBS, rows=1, slots=3)
    try:
        for sequence in (9, 5):
            ring.reserve(1, 1.0).commit(version=0, sequence=sequence)
        assert ring.waiting() == [9, 5]
    finally:
        ring.close(timeout_s=0.0)


def test_a_round_begins_with_the_smallest_version_of_several_producers_lives(pair):
    """A producer that started anew counts its batches from 1: their numbers say nothing about earlier ones'."""
    dispenser, batcher = pair(rows=2, wanted=9)
    send(dispenser, 0, version=7)
    send(dispenser, 2, version=4)
    for _ in range(2):
        assert batcher._receive(time.monotonic(), LIMIT_S)
    with batcher.round([0], LIMIT_S) as experience:
        assert experience.versions.tolist() == [4, 4]
