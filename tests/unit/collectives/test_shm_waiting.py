"""Barriers among threads: futexes work alike within and between processes."""

import threading
from pathlib import Path

import pytest

from collectives.errors import CommunicatorError
from collectives.rendezvous import this_member
from collectives.transports import calls
from collectives.transports.shm import waiting
from collectives.transports.shm.memory import Segment
from collectives.transports.shm.waiting import Barrier
from tests.threads import in_threads

BARRIER = calls.encode_call("barrier")
LIMIT_S = 30


def barriers(world_size, timeout_s=10.0):
    segment = Segment.host(world_size)
    members = [this_member(rank) for rank in range(world_size)]
    made = [Barrier(segment.words, segment.address, members, rank, timeout_s) for rank in range(world_size)]
    return segment, made


def test_no_wake_up_is_lost_when_everyone_sleeps_at_once(monkeypatch):
    # No member polls twice before it sleeps, and a sleep that no member ends outlasts the test.
    monkeypatch.setattr(waiting, "_SPINS", 0)
    monkeypatch.setattr(waiting, "_YIELD_S", 0.0)
    monkeypatch.setattr(waiting, "_SLEEP_S", 10 * LIMIT_S)
    segment, made = barriers(3)
    progress = [0] * 3

    def rounds(rank):
        for turn in range(1000):
            made[rank].arrive(BARRIER)
            progress[rank] = turn
            assert all(abs(other - turn) <= 1 for other in progress)

    assert in_threads([lambda rank=rank: rounds(rank) for rank in range(3)]) == [None] * 3
    segment.close()


def sleeps_on(thread, address):
    """Whether a thread is in a system call about an address: the futex that it sleeps on."""
    return hex(address) in Path(f"/proc/self/task/{thread}/syscall").read_text().split()


def test_a_leaving_member_wakes_those_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(waiting, "_SLEEP_S", 10 * LIMIT_S)
    segment, made = barriers(2)
    waits = []

    def leave():
        while not (waits and sleeps_on(waits[0], segment.address)):
            pass
        made[0].leave()

    def wait():
        waits.append(threading.get_native_id())
        made[1].arrive(BARRIER)

    _, error = in_threads([leave, wait])
    assert isinstance(error, CommunicatorError)
    assert "it left the group" in str(error)
    assert error.rank == 1
    segment.close()


def test_closing_from_another_thread_ends_a_wait():
    segment, made = barriers(2, timeout_s=10 * LIMIT_S)
    asleep = 1 * waiting.STRIDE + waiting.ASLEEP

    def close():
        while not segment.words[asleep]:
            pass
        made[1].leave()

    _, error = in_threads([close, lambda: made[1].arrive(BARRIER)])
    assert "this communicator is closed" in str(error)
    segment.close()


def test_an_absent_member_is_named_with_the_time_limit():
    segment, made = barriers(3, timeout_s=0.2)
    errors = in_threads([lambda: made[0].arrive(BARRIER), lambda: made[2].arrive(BARRIER)])
    for error in errors:
        assert error.operation == "barrier"
        assert "rank 1" in error.waiting_for
        assert "did not come within 0.2 s" in str(error) or "left the group" in str(error)
    with pytest.raises(CommunicatorError, match="an earlier barrier failed"):
        made[0].arrive(BARRIER)
    segment.close()


def test_a_member_that_timed_out_first_is_not_named_as_the_missing_one():
    segment, made = barriers(3)
    made[0]._timeout_s, made[1]._timeout_s = 0.1, 1.0
    first, second = in_threads([lambda: made[0].arrive(BARRIER), lambda: made[1].arrive(BARRIER)])
    for error in (first, second):
        assert error.waiting_for == str(made[0]._members[2])
    with pytest.raises(CommunicatorError, match="had timed out waiting for this process") as late:
        made[2].arrive(BARRIER)
    assert late.value.waiting_for == str(made[0]._members[0])
    segment.close()


def test_a_member_that_leaves_on_its_own_is_named():
    segment, made = barriers(3)
    made[0].leave()
    (error,) = in_threads([lambda: made[1].arrive(BARRIER)])
    assert (error.waiting_for, error.detail) == (str(made[0]._members[0]), "it left the group")
    segment.close()
