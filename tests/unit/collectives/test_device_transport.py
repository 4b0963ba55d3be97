"""The transport of GMIs that share a GPU, on CPU memory that processes share: the same code with other handles."""

import ctypes
import mmap
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from device_cases import (
    CASES,
    SIZES,
    EveryOperation,
    check_copies,
    check_reductions,
    connected,
    in_rank_order,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from members import run_group, succeeded

from collectives.errors import CommunicatorError
from collectives.rendezvous import this_member
from collectives.transports.device import DeviceTransport
from tests.programs import run_python


@pytest.fixture(scope="module", params=[2, 3], ids=["two processes", "three processes"])
def results(request):
    return succeeded(run_group("shm", request.param, EveryOperation("cpu")))


@pytest.mark.parametrize(("where", "size", "dtype"), CASES)
def test_reductions_are_those_in_rank_order_on_every_member(results, where, size, dtype):
    check_reductions(results, where, size, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["registered", "own"])
def test_sums_agree_with_float64(results, where, size):
    for dtype, accuracy in ((torch.float32, 4e-6), (torch.bfloat16, 2**-7), (torch.float64, 1e-14)):
        expected = sum(values(rank, size, dtype).double() for rank in range(len(results)))
        found = results[0]["all_reduce", "sum", where, size, dtype][2].double()
        torch.testing.assert_close(found, expected, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize(("where", "size", "dtype"), CASES)
def test_gathered_rows_and_broadcasts_are_the_members_own(results, where, size, dtype):
    check_copies(results, where, size, dtype)


def test_gather_takes_tensors_that_are_not_contiguous(results):
    expected = torch.stack([torch.full((3, 2), float(rank)) for rank in range(len(results))])
    assert torch.equal(results[0]["matrix"], expected)


class Reduce:
    """Members reduce these numbers in one process, which needs no start of others."""

    def __init__(self, parts, op):
        self.parts, self.op = parts, op

    def __call__(self, communicator, done):
        transport = connected(communicator)
        tensor = self.parts[communicator.rank].clone()
        transport.all_reduce(tensor, self.op)
        transport.barrier()
        return tensor


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_numbers_reduce_as_in_rank_order(data):
    n, size = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 70))
    op = data.draw(st.sampled_from(["sum", "mean", "max"]))
    numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)
    parts = [
        torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype=torch.float32)
        for _ in range(n)
    ]
    expected = in_rank_order(parts, op)
    for found in run_group("inprocess", n, Reduce(parts, op)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def keep_the_pace(communicator, done):
    """Each operation's input depends on the last one's output: a result read too late or early shows."""
    transport = connected(communicator)
    mine = transport.buffer(1000, torch.float32)
    mine.fill_(1.0)
    wrong = []
    for turn in range(60):
        mine.add_(communicator.rank)
        tensor = mine if turn % 3 else mine.clone()
        transport.all_reduce(tensor, "max")
        message = torch.full((500,), float(turn + communicator.rank))
        transport.broadcast(message, turn % transport.world_size)
        mine.copy_(tensor)
        if not mine.eq(1 + 2 * (turn + 1)).all() or not message.eq(turn + turn % 3).all():
            wrong.append(turn)
    return wrong


def test_no_member_overwrites_what_another_still_reads():
    # max over (x, x + 1, x + 2) is x + 2: after turn t everyone has 1 + 2 (t + 1).
    assert run_group("shm", 3, keep_the_pace) == [[], [], []]


def write_only_what_is_ones_own(communicator, done):
    """The others' memory can only be read here: to write there ends this process."""
    transport = connected(communicator)
    buffer = transport.buffer(50_000, torch.float32)
    for rank, view in enumerate(transport._registered[buffer.data_ptr()].views):
        if rank != transport.rank:
            protect(view)
    for operation in (transport.all_reduce, transport.reduce, transport.reduce_scatter, transport.broadcast):
        operation(buffer)
    return buffer.sum().item()


def protect(tensor):
    """Make the pages of a tensor read-only."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.numel() * tensor.element_size() - begin
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.PROT_READ) == 0


def test_no_member_writes_to_anothers_memory():
    """Otherwise a suspended member that was given up would do so when it resumes."""
    assert run_group("shm", 3, write_only_what_is_ones_own) == [0.0, 0.0, 0.0]


def call_differently(communicator, done):
    transport = connected(communicator)
    buffer = transport.buffer(10, torch.float32)
    try:
        if communicator.rank == 0:
            transport.all_reduce(buffer)
        else:
            transport.broadcast(torch.ones(7, dtype=torch.float64), source=1)
    except CommunicatorError as error:
        try:
            transport.barrier()
        except CommunicatorError as later:
            return str(error), str(later)
    return None


def test_members_that_call_different_operations_get_an_error_with_both():
    first, second = (
        "all_reduce(sum) of 10 float32 in buffer 1",
        "broadcast(source=1) of 7 float64 on a device",
    )
    (error, later), (other, _) = run_group("shm", 2, call_differently)
    assert f"rank 0 called {first}, and rank 1 {second}" in error
    assert f"rank 1 called {second}, and rank 0 {first}" in other
    assert "an earlier all_reduce failed" in later


def register_differently(communicator, done):
    connected(communicator).buffer(10 + communicator.rank, torch.float32)


def test_buffers_of_different_sizes_are_refused():
    for answer in run_group("inprocess", 2, register_differently):
        assert isinstance(answer.error, CommunicatorError)
        assert "buffer" in str(answer.error)


def lose_a_member(communicator, done):
    transport = connected(communicator)
    buffer = transport.buffer(1000, torch.float32)
    transport.all_reduce(buffer)
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        transport.all_reduce(buffer)


def test_a_killed_member_is_noticed_long_before_the_limit():
    answers = run_group("shm", 3, lose_a_member, timeout_s=40.0)
    assert answers[1] is None
    for rank in (0, 2):
        assert isinstance(answers[rank].error, CommunicatorError)
        assert answers[rank].error.waited_s < 30


def close_twice(communicator, done):
    transport = connected(communicator)
    transport.barrier()
    transport.close()
    transport.close()
    transport.all_reduce(torch.ones(3))


def test_a_closed_transport_says_so():
    for answer in run_group("inprocess", 2, close_twice):
        assert isinstance(answer.error, CommunicatorError)
        assert "this communicator is closed" in str(answer.error)


def test_a_tensor_elsewhere_is_refused_before_anyone_waits():
    class Alone:
        rank, world_size = 0, 2

    transport = DeviceTransport(Alone(), [this_member(0), this_member(1)], torch.device("cpu"), 1.0)
    with pytest.raises(ValueError, match="not one on meta"):
        transport.all_reduce(torch.ones(4, device="meta"))


def test_files_that_a_killed_member_left_are_removed_and_those_of_others_stay():
    """torch counts a shared buffer's users in a file, which a killed process does not remove."""
    name = "/dev/shm/torch_{pid}_7_7"
    code = f"import os; open('{name}'.format(pid=os.getpid()), 'w').close(); print(os.getpid())"
    ended = run_python(code)
    left, mine = Path(name.format(pid=ended.stdout.strip())), Path(name.format(pid=os.getpid()))
    mine.touch()
    try:
        assert left.exists()

        def close(communicator, done):
            me = this_member(communicator.rank)
            gone = replace(me, rank=2, pid=int(ended.stdout))
            transport = DeviceTransport(communicator, [me, me, gone], torch.device("cpu"), 1.0)
            communicator.barrier()
            transport.close()

        run_group("inprocess", 2, close)
        assert not left.exists()
        assert mine.exists()
    finally:
        mine.unlink()
