"""Compositions over real transports, each member in a process: compared with the reference execution."""

from functools import lru_cache, reduce

import pytest
import torch
from device_cases import DTYPES, values
from members import run_group, succeeded

from collectives.buckets import views
from collectives.compositions import compose
from collectives.layout import Layout
from collectives.transports.base import shares
from collectives.transports.shm.memory import STAGING_BUFFER_BYTES
from tests.unit.collectives.schedule_reference import execute

SIZES = (0, 1, 1001, STAGING_BUFFER_BYTES // 4 + 4097)
CALLS = [
    (size, dtype, op)
    for size in SIZES
    for dtype in DTYPES
    for op in ("sum", "mean", "max")
    if (op, dtype) != ("mean", torch.int64)
]


def all_reduce_in_every_way(communicator, done):
    """By call: the result, and whether other calls gave the same bits."""
    found = {}
    buffers = {dtype: communicator.buffer(SIZES[-1], dtype) for dtype in DTYPES}
    for size, dtype, op in CALLS:
        plain = values(communicator.rank, size, dtype)
        again, registered = plain.clone(), buffers[dtype][:size].copy_(plain)
        bucket = [part.clone() for part in plain.split([size // 3, size - size // 3])]
        parts = views(buffers[dtype], [torch.empty(size // 3), torch.empty(size - size // 3)])
        communicator.all_reduce(plain, op)
        handles = [communicator.all_reduce_async(tensors, op) for tensors in (again, bucket)]
        communicator.all_reduce(parts, op)
        for handle in handles:
            handle.wait()
        found[size, dtype, op] = plain
        found[size, dtype, op, "alike"] = [
            torch.equal(plain, other) for other in (again, registered, torch.cat(bucket))
        ]
    return found


CASES = [
    ("shm", "1x3", "ip_only"),
    ("auto", "2x2", "rp_only"),
    ("auto", "2x2", "hybrid(1)"),
    ("auto", "2+1", "har"),
    ("auto", "2x1x2", "ip_only"),
    ("auto", "1|2", "har"),
    ("tcp", "2x1x2", "ip_only"),
]


@lru_cache
def reduced(case):
    transport, text, composition = case
    world_size = Layout.parse(text).world_size
    return succeeded(
        run_group(transport, world_size, all_reduce_in_every_way, composition=composition, layout=text)
    )


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_rank_has_the_bits_of_the_reference_execution(case):
    answers = reduced(case)
    schedule = compose(case[2], Layout.parse(case[1]))
    for size, dtype, op in CALLS:
        expected = [values(rank, size, dtype) for rank in range(len(answers))]
        execute(schedule, expected, op)
        for rank, found in enumerate(answers):
            assert torch.equal(found[size, dtype, op], expected[0]), (size, dtype, op, rank)
            assert all(found[size, dtype, op, "alike"]), (
                size,
                dtype,
                op,
                rank,
                found[size, dtype, op, "alike"],
            )


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_sums_agree_with_float64(case):
    answers = reduced(case)
    for size in SIZES:
        total = reduce(torch.add, [values(rank, size, torch.float64) for rank in range(len(answers))])
        for dtype, accuracy in ((torch.float32, 4e-6), (torch.float64, 1e-14), (torch.bfloat16, 0.05)):
            found = answers[0][size, dtype, "sum"].double()
            torch.testing.assert_close(found, total, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_two_hosts_come_to_the_result_of_one(dtype):
    there, here = reduced(("auto", "2x1x2", "ip_only")), reduced(("tcp", "2x1x2", "ip_only"))
    for size in SIZES:
        one_host = reduce(torch.add, [values(rank, size, dtype) for rank in range(4)])
        for found in (there[0][size, dtype, "sum"], here[0][size, dtype, "sum"]):
            if dtype == torch.int64:
                assert torch.equal(found, one_host)
            else:
                torch.testing.assert_close(found, one_host, rtol=1e-14, atol=1e-14)


def other_operations(communicator, done):
    found = {}
    for size in SMALL:
        for op in ("sum", "mean"):
            tensor = values(communicator.rank, size, torch.bfloat16)
            communicator.reduce(tensor, op)
            found["reduce", size, op] = tensor
        tensor = values(communicator.rank, size, torch.float64)
        found["share", size] = communicator.reduce_scatter(tensor, "max")
        found["scattered", size] = tensor
        tensor = values(communicator.rank, size, torch.int64)
        communicator.broadcast(tensor, source=2)
        found["broadcast", size] = tensor
        found["gathered", size] = communicator.all_gather(values(communicator.rank, size, torch.bfloat16))
    communicator.barrier()
    return found


SMALL = (0, 1, 17, 40, 1001)


@pytest.mark.parametrize(("transport", "layout"), [("shm", "1x3"), ("tcp", "1x3"), ("auto", "1|2")])
def test_operations_that_are_no_all_reduce(transport, layout):
    answers = run_group(transport, 3, other_operations, layout=layout)
    for size in SMALL:
        wide = reduce(torch.add, [values(rank, size, torch.bfloat16).float() for rank in range(3)])
        total = wide.bfloat16()
        assert torch.equal(answers[0]["reduce", size, "sum"], total)
        assert torch.equal(answers[0]["reduce", size, "mean"], total / 3)
        most = reduce(torch.maximum, [values(rank, size, torch.float64) for rank in range(3)])
        rows = torch.stack([values(rank, size, torch.bfloat16) for rank in range(3)])
        assert [found["share", size] for found in answers] == list(shares(size, 3))
        for found in answers:
            begin, end = found["share", size]
            assert torch.equal(found["scattered", size][begin:end], most[begin:end])
            assert torch.equal(found["broadcast", size], values(2, size, torch.int64))
            assert torch.equal(found["gathered", size], rows)


def reduce_beside_a_computation(communicator, done):
    tensor = torch.full((100_000,), float(communicator.rank + 1))
    if communicator.rank == 1:
        assert done.wait(30)
        communicator.all_reduce(tensor, "mean")
        return tensor.unique().tolist()
    handle = communicator.all_reduce_async(tensor, "mean")
    product = torch.ones(64, 64) @ torch.ones(64, 64)
    pending = not handle.done()
    done.set()
    handle.wait()
    return pending, product.unique().tolist(), tensor.unique().tolist()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_caller_computes_while_its_reduction_waits_for_the_others(transport):
    first, second = run_group(transport, 2, reduce_beside_a_computation)
    assert first == (True, [64.0], [1.5])
    assert second == [1.5]


def use_groups(communicator, done):
    rank = communicator.rank
    pairs = [communicator.group(ranks) for ranks in ([0, 1], [1, 2], [2, 0])]
    tensors = [torch.full((1001,), float(10**rank)) for _ in pairs]
    handles = [
        pair.all_reduce_async(tensor) for pair, tensor in zip(pairs, tensors, strict=True) if pair is not None
    ]
    whole = torch.full((1001,), float(10**rank))
    communicator.all_reduce(whole)
    for handle in handles:
        handle.wait()
    sums = [tensor.unique().tolist() for pair, tensor in zip(pairs, tensors, strict=True) if pair is not None]
    return sums, whole.unique().tolist()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_several_groups_in_a_process_reduce_side_by_side(transport):
    expected = [[[11.0], [101.0]], [[11.0], [110.0]], [[110.0], [101.0]]]
    assert run_group(transport, 3, use_groups) == [(sums, [111.0]) for sums in expected]


def close_while_others_are_awaited(communicator, done):
    if communicator.rank == 1:
        communicator.all_reduce(torch.ones(10))
        assert done.wait(30)
        return None
    first, handle = (communicator.all_reduce_async(torch.ones(10)) for _ in range(2))
    first.wait()
    torch.ones(500, 500) @ torch.ones(500, 500)  # while the second begins to wait
    communicator.close()
    done.set()
    try:
        handle.wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_close_ends_an_operation_that_waits_for_others(transport):
    # The operation's own limit is longer than what the test waits for an answer.
    answer = run_group(transport, 2, close_while_others_are_awaited, timeout_s=300.0)[0]
    assert answer.startswith("CommunicatorError: ")
    assert "closed" in answer
