"""Every transport, compared with float64 sums, with each member in a separate process."""

import os
import signal
import time
from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from device_cases import values
from members import run_group, succeeded

from collectives.errors import CommunicatorError
from collectives.transports.shm.memory import STAGING_BUFFER_BYTES

LARGER_THAN_A_HALF = STAGING_BUFFER_BYTES // 4 + 4097
SIZES = (0, 1, 7, 1001, LARGER_THAN_A_HALF)
FLOATS = (torch.float32, torch.float64)


def every_operation(communicator, done):
    found = {}
    for size in SIZES:
        for dtype in (*FLOATS, torch.int64):
            for op in ("sum", "mean", "max"):
                if op == "mean" and dtype == torch.int64:
                    continue
                tensor = values(communicator.rank, size, dtype)
                communicator.all_reduce(tensor, op)
                found[op, size, dtype] = tensor
            found["gather", size, dtype] = communicator.all_gather(values(communicator.rank, size, dtype))
            for source in range(communicator.world_size):
                tensor = values(communicator.rank, size, dtype)
                communicator.broadcast(tensor, source)
                found["broadcast", source, size, dtype] = tensor
    matrix = communicator.all_gather(torch.full((2, 3), float(communicator.rank)).t())
    found["matrix"] = matrix
    communicator.barrier()
    found["identity"] = (communicator.rank, communicator.world_size)
    return found


GROUPS = [(transport, world) for transport in ("inprocess", "tcp", "gloo", "shm") for world in (2, 3)]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def results(request):
    transport, world_size = request.param
    return succeeded(run_group(transport, world_size, every_operation))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_float_sums_and_means_agree_with_float64(results, op, size):
    for dtype in FLOATS:
        total = sum(values(rank, size, dtype).double() for rank in range(len(results)))
        expected = total / len(results) if op == "mean" else total
        accuracy = 1e-6 if dtype == torch.float32 else 1e-15
        torch.testing.assert_close(
            results[0][op, size, dtype].double(), expected, rtol=4 * accuracy, atol=4 * accuracy
        )


@pytest.mark.parametrize("size", SIZES)
def test_integer_sums_and_all_maxima_are_exact(results, size):
    parts = [values(rank, size, torch.int64) for rank in range(len(results))]
    assert torch.equal(results[0]["sum", size, torch.int64], sum(parts[1:], parts[0]))
    for dtype in (*FLOATS, torch.int64):
        parts = [values(rank, size, dtype) for rank in range(len(results))]
        assert torch.equal(results[0]["max", size, dtype], reduce(torch.maximum, parts))


def test_results_are_bitwise_equal_on_all_members(results):
    for name in results[0]:
        if name != "identity":
            assert all(torch.equal(results[0][name], other[name]) for other in results[1:]), name


@pytest.mark.parametrize("size", SIZES)
def test_gathered_rows_are_in_rank_order(results, size):
    for dtype in (*FLOATS, torch.int64):
        expected = torch.stack([values(rank, size, dtype) for rank in range(len(results))])
        assert torch.equal(results[-1]["gather", size, dtype], expected)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_gives_everyone_the_source_s_tensor(results, size):
    for dtype in (*FLOATS, torch.int64):
        for source in range(len(results)):
            expected = values(source, size, dtype)
            assert all(torch.equal(found["broadcast", source, size, dtype], expected) for found in results)


def test_gather_takes_tensors_that_are_not_contiguous(results):
    expected = torch.stack([torch.full((3, 2), float(rank)) for rank in range(len(results))])
    assert torch.equal(results[0]["matrix"], expected)


def test_members_know_their_rank_and_number(results):
    assert [found["identity"] for found in results] == [(rank, len(results)) for rank in range(len(results))]


def test_shared_memory_sums_in_the_reference_s_order():
    reference = run_group("inprocess", 3, every_operation)[0]
    found = run_group("shm", 3, every_operation)[0]
    for name, expected in reference.items():
        if name != "identity":
            assert torch.equal(found[name], expected), name


def wait_for_an_absent_member(communicator, done):
    if communicator.rank == 1:
        done.wait(30)
        return None
    errors = []
    for _ in range(2):
        try:
            communicator.all_reduce(torch.ones(5))
        except CommunicatorError as error:
            errors.append(error)
    done.set()
    return errors


@pytest.mark.parametrize("transport", ["inprocess", "tcp", "gloo", "shm"])
def test_an_absent_member_is_reported_within_the_limit_and_the_group_is_unusable_after(transport):
    errors = run_group(transport, 2, wait_for_an_absent_member, timeout_s=1.0)[0]
    assert len(errors) == 2
    assert errors[0].operation == "all_reduce"
    assert errors[0].rank == 0
    assert "1" in errors[0].waiting_for
    assert 0.5 < errors[0].waited_s < 20


def lose_a_member(communicator, done):
    communicator.barrier()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        communicator.all_reduce(torch.ones(1000))
    return


@pytest.mark.parametrize("transport", ["tcp", "gloo", "shm"])
def test_a_killed_member_is_noticed_long_before_the_limit(transport):
    answers = run_group(transport, 3, lose_a_member, timeout_s=40.0)
    assert answers[1] is None
    for rank in (0, 2):
        assert isinstance(answers[rank].error, CommunicatorError)
        assert answers[rank].error.waited_s < 30


def leave_early(communicator, done):
    communicator.barrier()
    if communicator.rank == 1:
        communicator.close()
        communicator.close()
        done.wait(30)
        return
    try:
        communicator.all_reduce(torch.ones(3))
    finally:
        done.set()


@pytest.mark.parametrize("transport", ["inprocess", "tcp", "gloo", "shm"])
def test_a_member_that_leaves_is_noticed_long_before_the_limit(transport):
    error = run_group(transport, 2, leave_early, timeout_s=40.0)[0].error
    assert isinstance(error, CommunicatorError)
    assert error.waited_s < 30


def use_after_close(communicator, done):
    communicator.barrier()
    communicator.close()
    communicator.barrier()


@pytest.mark.parametrize("transport", ["tcp", "gloo", "shm"])
def test_a_closed_communicator_says_so(transport):
    error = run_group(transport, 2, use_after_close)[0].error
    assert isinstance(error, CommunicatorError)
    assert "closed" in str(error)


def alternate_reductions_and_broadcasts(communicator, done):
    """Rank 1 is slow after every barrier, when it still has to copy out what the others may already write over."""
    if communicator.rank == 1 and hasattr(communicator, "_barrier"):
        arrive = communicator._barrier.arrive

        def arrive_and_dawdle(call):
            arrive(call)
            time.sleep(1e-3)

        communicator._barrier.arrive = arrive_and_dawdle
    wrong = []
    for turn in range(30):
        tensor = torch.full((1000,), float(turn + communicator.rank))
        communicator.all_reduce(tensor)
        message = torch.full((1000,), float(1000 * turn + communicator.rank))
        communicator.broadcast(message, source=0)
        gathered = communicator.all_gather(torch.full((1000,), float(communicator.rank)))
        if not (tensor == 2 * turn + 1).all() or not (message == 1000 * turn).all():
            wrong.append((turn, tensor.unique().tolist(), message.unique().tolist()))
        if gathered.mean(1).tolist() != [0.0, 1.0]:
            wrong.append((turn, gathered.mean(1).tolist()))
    return wrong


@pytest.mark.parametrize("transport", ["inprocess", "tcp", "gloo", "shm"])
def test_a_slow_member_still_gets_the_result_of_the_operation_before(transport):
    assert run_group(transport, 2, alternate_reductions_and_broadcasts) == [[], []]


def call_differently(communicator, done):
    communicator.barrier()
    call = DIFFERENT_CALLS[communicator.rank if communicator.rank < 2 else 0]
    try:
        call(communicator)
    except CommunicatorError as error:
        try:
            communicator.barrier()
        except CommunicatorError as later:
            return str(error), str(later)
    return None


DIFFERENT_CALLS = (
    lambda communicator: communicator.all_reduce(torch.ones(7)),
    lambda communicator: communicator.broadcast(torch.ones(7, dtype=torch.float64), source=1),
)


def test_shared_memory_names_both_calls_when_members_call_different_ones():
    answers = run_group("shm", 3, call_differently)
    first, second = "all_reduce(sum) of 7 float32", "broadcast(source=1) of 7 float64"
    for rank, other, mine, theirs in ((0, 1, first, second), (1, 0, second, first), (2, 1, first, second)):
        error, later = answers[rank]
        assert f"rank {rank} called {mine}, and rank {other} {theirs}" in error
        assert "an earlier" in later


@dataclass(frozen=True)
class Reduce:
    """Each rank reduces a tensor of its own size, by its own operator."""

    sizes: tuple[int, int]
    ops: tuple[str, str] = ("sum", "sum")

    def __call__(self, communicator, done):
        communicator.all_reduce(torch.ones(self.sizes[communicator.rank]), self.ops[communicator.rank])


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (Reduce((7, 8)), "all_reduce(sum) of 8 float32"),
        (Reduce((STAGING_BUFFER_BYTES // 4, LARGER_THAN_A_HALF)), f"of {LARGER_THAN_A_HALF} float32"),
        (Reduce((7, 7), ("sum", "max")), "all_reduce(max) of 7 float32"),
    ],
)
def test_shared_memory_notices_another_size_or_operator(task, named):
    for answer in run_group("shm", 2, task):
        assert isinstance(answer.error, CommunicatorError)
        assert named in str(answer.error)
