"""Point-to-point messages: by threads, by processes over shared memory and Gloo, and when one side is lost."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from members import Failed, run_group
from test_composed import run_threads

from collectives import point_to_point
from collectives.errors import CommunicatorError, MemberLostError
from collectives.point_to_point import MESSAGE_DTYPES
from collectives.solo import SoloCommunicator
from tests.unit.collectives.thread_group import ThreadGroup

WAYS = [("auto", None), ("gloo", None), ("auto", "1|1|1")]
"""Shared memory; Gloo on one host; Gloo between members that claim different hosts."""


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(MESSAGE_DTYPES),
    st.lists(st.integers(0, 4), max_size=8),
    st.integers(0, 2**31 - 1),
)
def test_what_arrives_has_the_type_shape_and_bits_that_were_sent(dtype, shape, seed):
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    sent = raw.view(dtype).reshape(shape)

    def task(communicator):
        if communicator.rank == 0:
            communicator.send(sent, to=1).wait()
            return None
        return communicator.recv(source=0)

    came = run_threads(ThreadGroup.on_one_device(2, timeout_s=20.0), task)[1]
    assert (came.dtype, came.shape) == (dtype, torch.Size(shape))
    assert bits(came) == bits(sent)


def test_closing_waits_for_all_messages_together_no_longer_than_the_limit(monkeypatch):
    limits, now = [], iter([100.0, 101.5, 107.0])
    monkeypatch.setattr(point_to_point, "time", SimpleNamespace(monotonic=lambda: next(now)))

    class Queue:
        def close(self, interrupt, limit_s):
            limits.append(limit_s)

    closing = point_to_point.PointToPointChannels(0, 3, connect=None, guarded=None)
    closing._queues = {(0, 1): Queue(), (2, 0): Queue()}
    closing.close(5.0)
    assert limits == [3.5, 0.0]


def around(communicator, _):
    """Every member sends to the next before it receives from the previous one, twice, with a reduction between."""
    rank, size = communicator.rank, communicator.world_size
    following, previous = (rank + 1) % size, (rank - 1) % size
    large = torch.arange(400_000, dtype=torch.float64) + rank  # several pieces of staging memory
    sent = [communicator.send(torch.tensor([rank, 7]), following), communicator.send(large, following)]
    total = torch.tensor([float(rank)])
    communicator.all_reduce(total)
    small, big = communicator.recv(previous), communicator.recv(previous)
    for handle in sent:
        handle.wait()
    return small.tolist(), torch.equal(big, large - rank + previous), total.item()


@pytest.mark.parametrize(("transport", "layout"), WAYS)
def test_all_may_send_before_they_receive(transport, layout):
    answers = run_group(transport, 3, around, layout=layout)
    assert answers == [([2, 7], True, 3.0), ([0, 7], True, 3.0), ([1, 7], True, 3.0)]


def out_of_step(communicator, _):
    """Rank 0 waits for 2 first although 1 sent long before."""
    if communicator.rank == 1:
        for number in range(3):
            communicator.send(torch.tensor([number]), 0)
        communicator.send(torch.tensor([9]), 2).wait()
        communicator.recv(0)
    elif communicator.rank == 2:
        assert communicator.recv(1).item() == 9
        communicator.send(torch.tensor([5]), 0).wait()
    else:
        late = communicator.recv(2).item()
        order = [communicator.recv(1).item() for _ in range(3)]
        communicator.send(torch.empty(0), 1).wait()
        return late, order
    return None


def test_members_do_not_wait_for_messages_of_others_and_messages_keep_their_order():
    assert run_group("auto", 3, out_of_step)[0] == (5, [0, 1, 2])


def in_group(communicator, _):
    """Ranks 2 and 0 as 0 and 1 of a group."""
    group = communicator.group([2, 0])
    if group is None:
        return None
    if group.rank == 0:
        group.send(torch.tensor([4.0]), 1).wait()
        return None
    return group.recv(0).item()


def test_groups_count_their_own_ranks():
    assert run_group("auto", 3, in_group) == [4.0, None, None]


def in_vain(communicator, done):
    if communicator.rank == 1:
        done.wait(30)
        return None
    try:
        communicator.recv(1)
    except CommunicatorError as first:
        try:
            communicator.barrier()
        except CommunicatorError as second:
            return first, second
    finally:
        done.set()
    return None


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_message_that_does_not_come_ends_the_wait_and_the_communicator(transport):
    first, second = run_group(transport, 2, in_vain, timeout_s=1.0)[0]
    assert first.operation == "recv from rank 1"
    assert "within 1.0 s" in str(first)
    assert 1.0 <= first.waited_s < 10.0
    assert "an earlier recv from rank 1 failed" in str(second)


def killed(communicator, _):
    if communicator.rank == 1:
        communicator.recv(0)
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.send(torch.zeros(3), 1).wait()
    communicator.recv(1)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_sender_that_dies_is_named_long_before_the_time_limit(transport):
    failed = run_group(transport, 2, killed, timeout_s=30.0)[0]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, MemberLostError)
    assert failed.error.operation == "recv from rank 1"
    assert failed.error.waited_s < 10.0


def leaving(communicator, _):
    if communicator.rank == 1:
        communicator.send(torch.zeros(1), 0).wait()
        return
    communicator.recv(1)
    communicator.recv(1)


def test_a_sender_that_leaves_ends_the_wait():
    failed = run_group("auto", 2, leaving, timeout_s=30.0)[0]
    assert isinstance(failed, Failed)
    assert "recv from rank 1 on rank 0 failed" in str(failed.error)


def test_invalid_messages_are_refused_before_data_moves():
    def task(communicator):
        if communicator.rank == 0:
            with pytest.raises(ValueError, match="to=2: give a rank from 0 to 1, not 0"):
                communicator.send(torch.zeros(1), 2)
            with pytest.raises(ValueError, match="source=0"):
                communicator.recv(0)
            with pytest.raises(ValueError, match=r"complex64: messages hold float32, .*bool"):
                communicator.send(torch.zeros(1, dtype=torch.complex64), 1)
            with pytest.raises(ValueError, match="at most 8"):
                communicator.send(torch.zeros([1] * 9), 1)
            communicator.send(torch.ones(1), 1).wait()
            return None
        return communicator.recv(0).item()

    assert run_threads(ThreadGroup.on_one_device(2, timeout_s=20.0), task)[1] == 1.0
    with pytest.raises(ValueError, match="no other member"):
        SoloCommunicator().send(torch.zeros(1), 1)
