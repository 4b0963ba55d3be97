"""Every operation among processes, in registered and in other memory, against sums in rank order made here."""

import gc
import os
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from device_cases import in_rank_order, values
from shm_members import run_members

from collectives.errors import CommunicatorError
from collectives.transports.base import DTYPES, shares
from collectives.transports.shm.memory import STAGING_BUFFER_BYTES, Segment

PIECES_3 = 2 * STAGING_BUFFER_BYTES // 4 + 4099
"""float32 elements that pass the staging memory in three pieces, the last an odd one."""
SIZES = (0, 1, 1001, 8209, PIECES_3)


def kinds():
    return [
        (op, size, dtype)
        for op in ("sum", "mean", "max")
        for size in SIZES
        for dtype in DTYPES
        if op != "mean" or dtype in (torch.float32, torch.bfloat16)
    ]


def every_operation(transport):
    """Small results by name, and what differs from its definition: large results would be much to send."""
    buffers = {dtype: transport.buffer(PIECES_3, dtype) for dtype in DTYPES}
    wrong = [f"buffer of {dtype} is not zero" for dtype, buffer in buffers.items() if buffer.any()]
    found = {}
    for op, size, dtype in kinds():
        for tensor in (buffers[dtype][:size], shifted(size, dtype)):
            wrong += [
                (operation, op, size, dtype)
                for operation in ("all_reduce", "reduce", "reduce_scatter")
                if not is_right(transport, operation, tensor, op)
            ]
        if size < 2000:
            tensor = values(transport.rank, size, dtype)
            transport.all_reduce(tensor, op)
            found[op, size, dtype] = tensor
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            tensors = [torch.empty(size, dtype=dtype)] + ([buffers[dtype][:size]] if dtype in buffers else [])
            wrong += [(size, dtype) for tensor in tensors if not moves_right(transport, tensor)]
    transport.barrier()
    return found, wrong


def shifted(size, dtype):
    """A tensor that begins one element behind an aligned address."""
    return torch.empty(size + 1, dtype=dtype)[1:]


def is_right(transport, operation, tensor, op):
    """Reduce every member's values in this tensor; whether what must hold the result does."""
    parts = [values(rank, tensor.numel(), tensor.dtype) for rank in range(transport.world_size)]
    tensor.copy_(parts[transport.rank])
    answer = getattr(transport, operation)(tensor, op)
    share = shares(tensor.numel(), transport.world_size)[transport.rank]
    begin, end = {
        "all_reduce": (0, tensor.numel()),
        "reduce": (0, tensor.numel() if transport.rank == 0 else 0),
        "reduce_scatter": share,
    }[operation]
    expected = in_rank_order(parts, op)
    return torch.equal(tensor[begin:end], expected[begin:end]) and answer in (None, share)


def moves_right(transport, tensor):
    """Gather and broadcast from everyone."""
    world_size, size, dtype = transport.world_size, tensor.numel(), tensor.dtype
    parts = [values(rank, size, torch.float32).mul(100).to(dtype) for rank in range(world_size)]
    tensor.copy_(parts[transport.rank])
    right = torch.equal(transport.all_gather(tensor), torch.stack(parts))
    for source in range(world_size):
        tensor.copy_(parts[transport.rank])
        transport.broadcast(tensor, source)
        right &= torch.equal(tensor, parts[source])
    return right


@pytest.fixture(
    scope="module",
    params=[
        (2, True), (3, True), (2, False), pytest.param((5, True), marks=pytest.mark.slow),
        pytest.param((4, True), marks=pytest.mark.slow), pytest.param((3, False), marks=pytest.mark.slow),
    ],
)  # fmt: skip
def results(request):
    world_size, compiler = request.param
    answers = run_members(world_size, every_operation, without_compiler=() if compiler else (0,))
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def test_every_member_finds_what_the_definition_says(results):
    assert [wrong for _, wrong in results] == [[]] * len(results)


def test_sums_agree_with_float64(results):
    accuracy = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8}
    for (op, size, dtype), found in results[0][0].items():
        if op == "sum" and dtype in accuracy:
            total = sum(values(rank, size, dtype).double() for rank in range(len(results)))
            limit = 4 * accuracy[dtype]
            torch.testing.assert_close(found.double(), total, rtol=limit, atol=limit)


def test_results_are_bitwise_equal_on_all_members(results):
    for name, found in results[0][0].items():
        assert all(torch.equal(found, other[name]) for other, _ in results[1:]), name


def dawdle_and_mix(transport):
    """Members are late by turns, right after a barrier, when others may already fill the next piece."""
    calls = 0

    def late_after(method):
        def call_late(*arguments):
            nonlocal calls
            method(*arguments)
            calls += 1
            if (calls + transport.rank) % 3 == 0:
                time.sleep(5e-4)

        return call_late

    barrier = transport._barrier
    if transport._kernel is None:
        barrier.arrive = late_after(barrier.arrive)
    else:
        barrier.run = late_after(barrier.run)
    registered, wrong, world_size = transport.buffer(9000, torch.float32), [], transport.world_size
    total = world_size * (world_size - 1) / 2
    for turn in range(25):
        small = torch.full((1000,), float(turn + transport.rank))
        large = torch.full((PIECES_3,), float(turn + transport.rank))
        registered.fill_(turn + transport.rank)
        message = torch.full((STAGING_BUFFER_BYTES // 2,), float(1000 * turn + transport.rank))
        transport.all_reduce(small)
        transport.all_reduce(large)
        transport.broadcast(message, source=turn % world_size)
        transport.all_reduce(registered)
        gathered = transport.all_gather(registered)
        transport.reduce(large)
        checks = {
            "small": (small == world_size * turn + total).all(),
            "registered": (registered == world_size * turn + total).all(),
            "message": (message == 1000 * turn + turn % world_size).all(),
            "gathered": (gathered == world_size * turn + total).all(),
            "large": transport.rank != 0 or (large == world_size * (world_size * turn + total)).all(),
        }
        wrong += [(turn, name) for name, right in checks.items() if not right]
    return wrong


@pytest.mark.parametrize(
    ("world_size", "without_compiler"),
    [
        (3, ()),
        (2, (0,)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, ()), (4, ()), (4, (0,)))),
    ],
)
def test_late_members_neither_spoil_nor_miss_what_others_exchange(world_size, without_compiler):
    answers = run_members(world_size, dawdle_and_mix, without_compiler=without_compiler)
    assert answers == [[]] * world_size


def allocations(transport):
    """Largest block that torch allocates, and bytes that Python keeps and takes, while the same tensors are reduced."""
    registered, private = transport.buffer(100_001, torch.float32), torch.ones(PIECES_3)
    halves = transport.buffer(5000, torch.bfloat16)

    def reduce_all():
        for tensor in (registered, private, halves, private[:100]):
            for op in ("sum", "mean", "max"):
                transport.all_reduce(tensor, op)
                transport.reduce_scatter(tensor, op)
                transport.reduce(tensor, op)

    reduce_all()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        reduce_all()
    block = max(event.self_cpu_memory_usage for event in profile.events())
    tracemalloc.start()
    reduce_all()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(3):
        reduce_all()
    after, peak = tracemalloc.get_traced_memory()
    return block, after - before, peak - before


@pytest.mark.parametrize(
    ("without_compiler", "most"),
    [
        pytest.param((), 0, id="compiled"),
        # In Python the 5000 numbers of bfloat16 are summed in a float32 tensor of the moment.
        pytest.param((0,), 5000 * 4, marks=pytest.mark.slow, id="python"),
    ],
)
def test_what_the_steady_state_allocates(without_compiler, most):
    for block, kept, peak in run_members(3, allocations, without_compiler=without_compiler):
        assert block == most
        assert kept < 1000
        assert peak < 10_000  # views and numbers of the operation in progress


def held():
    """What a transport may hold: descriptors and mappings of shared memory, descriptors of processes."""
    gc.collect()
    descriptors = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the descriptor of this very listing
            continue
        if "rayagi-collective" in target or "pidfd" in target:
            descriptors.append(target)
    return descriptors, Path("/proc/self/maps").read_text().count("rayagi-collective")


def use_and_close(transport):
    buffer = transport.buffer(100_000, torch.float32)
    transport.all_reduce(buffer)
    transport.all_reduce(torch.ones(200_000))
    during = held()
    transport.close()
    transport.close()
    sum_after_close = buffer.sum().item()
    with_buffer = held()
    del buffer
    return during, with_buffer, held(), sum_after_close


def test_closing_leaves_no_descriptor_and_no_mapping():
    for during, with_buffer, after, total in run_members(3, use_and_close):
        assert len(during[0]) >= 3  # the file, and two processes
        assert during[1] == 2
        assert with_buffer[1] == 0  # a buffer lives while the caller keeps it, as memory of its own
        assert total == 0.0
        assert after == ([], 0)


def call_differently(transport):
    buffer = transport.buffer(40_000, torch.float32)
    mine = buffer if transport.rank == 0 else torch.ones(40_000)
    try:
        transport.all_reduce(mine)
    except CommunicatorError as error:
        text = str(error)
    del mine, buffer
    return text, held()


@pytest.mark.parametrize("without_compiler", [(), (0,)], ids=["compiled", "python"])
def test_members_that_disagree_on_the_tensors_place_get_both_calls(without_compiler):
    answers = run_members(2, call_differently, without_compiler=without_compiler)
    for rank, (text, left) in enumerate(answers):
        calls = ["all_reduce(sum) of 40000 float32 in buffer 1", "all_reduce(sum) of 40000 float32"]
        assert f"rank {rank} called {calls[rank]}, and rank {1 - rank} {calls[1 - rank]};" in text
        assert left == ([], 0)


def use_what_is_no_use(transport):
    reasons = []
    for call in (
        lambda: transport.all_reduce(torch.ones(3, 4).t()),
        lambda: transport.buffer(-1, torch.float32),
    ):
        try:
            call()
        except ValueError as error:
            reasons.append(str(error))
    transport.barrier()  # what was refused has sent nothing
    return reasons


def test_bad_arguments_are_refused_before_anything_is_sent():
    for reasons in run_members(2, use_what_is_no_use):
        assert [reason.split(";")[0] for reason in reasons] == [
            "the tensor of shape (4, 3) is not contiguous",
            "memory cannot have -1 elements",
        ]


def ask_for_too_much(transport):
    try:
        transport.buffer(2**58, torch.float64)
    except CommunicatorError as error:
        return str(error)
    return None


def test_a_buffer_larger_than_the_host_s_memory_is_refused_everywhere():
    answers = run_members(2, ask_for_too_much)
    assert "that is more memory than this host, or this process's cgroup, has" in answers[0]
    assert "rank 0" in answers[1]
    assert "it left the group" in answers[1]


def number_of(segment):
    """Of its descriptor, as its endpoint names it."""
    return int(segment.endpoint.partition("#")[0].rpartition("/")[2])


def test_a_segment_whose_number_another_file_has_is_not_taken_for_it():
    """Descriptor numbers are reused: who comes late must not join another group's memory."""
    first = Segment.host(2)
    endpoint, number = first.endpoint, number_of(first)
    first.close()
    other = Segment.host(2)
    os.dup2(number_of(other), number)
    try:
        with pytest.raises(CommunicatorError, match="it no longer exists: another file has its number"):
            Segment.attach(endpoint, 2, 1)
        Segment.attach(other.endpoint, 2, 1).close()
    finally:
        if number != number_of(other):
            os.close(number)
        other.close()
