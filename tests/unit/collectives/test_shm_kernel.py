"""The compiled kernel among threads of one process, compared with the definition and with the Python reference."""

import logging
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shm_members import run_members
from test_shm_waiting import LIMIT_S

from collectives import kernels
from collectives.errors import CommunicatorError, MemberLostError
from collectives.rendezvous import this_member
from collectives.shared_words import WORD_BYTES
from collectives.transports.base import DTYPES, combine, shares
from collectives.transports.shm import SharedMemoryTransport, kernel, waiting
from collectives.transports.shm.memory import CACHE_LINE_BYTES, Segment
from tests.signals import set_default_signals
from tests.threads import in_threads

CHUNK_ELEMENTS = 2048
"""float32 of a chunk in kernel.c."""


def group(world_size, timeout_s=10.0, check=lambda waited_s: None):
    """Transports of one group, all in this process."""
    segment = Segment.host(world_size)
    attached = [segment] + [
        Segment.attach(segment.endpoint, world_size, rank) for rank in range(1, world_size)
    ]
    members = [this_member(rank) for rank in range(world_size)]
    made = [None] * world_size

    def make(rank):
        made[rank] = SharedMemoryTransport(attached[rank], members, rank, timeout_s, check)

    assert in_threads([lambda rank=rank: make(rank) for rank in range(world_size)]) == [None] * world_size
    return made


def close(transports):
    for transport in transports:
        transport.close()


@st.composite
def tensors(draw):
    """Every member's part: few members and many, sizes about shares and chunks, values that test the order of sums."""
    world_size = draw(st.integers(2, 6))
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from(["sum", "max"] if dtype == torch.int64 else ["sum", "mean", "max"]))
    near = draw(st.sampled_from([9000, 16 * world_size * 700, world_size * CHUNK_ELEMENTS, 50_000]))
    numel = near + draw(st.integers(-17, 17))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    parts = torch.randn(world_size, numel, generator=generator, dtype=torch.float64) * 1000
    if dtype != torch.int64:
        parts[draw(st.integers(0, world_size - 1)), draw(st.integers(0, numel - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), -float("inf")])
        )
    return op, list(parts.to(dtype))


@settings(max_examples=30, deadline=None)
@given(tensors())
def test_chunks_that_anyone_claims_give_what_the_definition_says(case):
    op, parts = case
    numel, dtype, world_size = parts[0].numel(), parts[0].dtype, len(parts)
    transports = group(world_size)
    found = [None] * world_size

    def reduce_twice(rank):
        buffer = transports[rank].buffer(numel, dtype)
        buffer.copy_(parts[rank])
        transports[rank].all_reduce(buffer, op)
        whole = buffer.clone()
        buffer.copy_(parts[rank])
        begin, end = transports[rank].reduce_scatter(buffer, op)
        found[rank] = whole, (begin, end), buffer[begin:end].clone()

    assert (
        in_threads([lambda rank=rank: reduce_twice(rank) for rank in range(world_size)])
        == [None] * world_size
    )
    expected = torch.empty_like(parts[0])
    combine(parts, expected, op)
    for rank, (whole, share, scattered) in enumerate(found):
        torch.testing.assert_close(whole, expected, rtol=0, atol=0, equal_nan=True)
        assert share == shares(numel, world_size)[rank]
        torch.testing.assert_close(scattered, expected[slice(*share)], rtol=0, atol=0, equal_nan=True)
    close(transports)


def test_the_last_member_to_arrive_works_for_sleeping_members():
    # Rank 1 sleeps until rank 0 comes; then 64 MiB are there to be reduced, and each of both claims some.
    numel = 2**24
    transports = group(2, timeout_s=LIMIT_S)
    sums = [None, None]

    def reduce(rank):
        buffer = transports[rank].buffer(numel, torch.float32)
        buffer.fill_(rank + 1)
        if rank == 0:
            asleep = kernel.STRIDE + kernel._SLEEPS
            while not transports[0]._kernel._words[asleep]:
                time.sleep(1e-4)
        transports[rank].all_reduce(buffer)
        sums[rank] = (buffer == 3).all().item()

    assert in_threads([lambda: reduce(0), lambda: reduce(1)]) == [None, None]
    assert sums == [True, True]
    close(transports)


def test_an_absent_member_is_named_with_the_time_limit():
    transports = group(3, timeout_s=0.2)
    errors = in_threads([transports[0].barrier, lambda: transports[2].all_reduce(torch.ones(3))])
    assert all(isinstance(error, CommunicatorError) for error in errors)
    assert any("rank 1" in error.waiting_for or "left the group" in error.detail for error in errors)
    close(transports)


@pytest.mark.parametrize("given_up", [0.1, 20.0], ids=["both give up", "one follows the other"])
def test_a_member_suspended_within_a_chunk_is_named_by_all(given_up):
    """Rank 2 arrives at a reduction, claims a chunk, and stops."""
    transports = group(3)
    buffers = [None] * 3

    def ask(rank):
        buffers[rank] = transports[rank].buffer(50_000, torch.float32)

    in_threads([lambda rank=rank: ask(rank) for rank in range(3)])
    transports[0]._barrier._timeout_s, transports[1]._barrier._timeout_s = 0.1, given_up
    words, stopped = transports[2]._segment.words, 2 * waiting.STRIDE
    arrivals = words[stopped + waiting.ARRIVALS] + 1
    claimed = stopped + 2 * CACHE_LINE_BYTES // WORD_BYTES + (transports[2]._kernel._state.reductions + 1 & 1)

    def stop_inside():
        # After the others have arrived: it publishes the same call and its arrival, and claims a chunk of its share.
        while min(words[waiting.ARRIVALS], words[waiting.STRIDE + waiting.ARRIVALS]) < arrivals:
            os.sched_yield()
        words[stopped + waiting.CALL + (arrivals & 1)] = words[waiting.CALL + (arrivals & 1)]
        words[claimed] += 1
        words[stopped + waiting.ARRIVALS] = arrivals

    first, second, _ = in_threads(
        [
            lambda: transports[0].all_reduce(buffers[0]),
            lambda: transports[1].all_reduce(buffers[1]),
            stop_inside,
        ]
    )
    for error in (first, second):
        assert isinstance(error, CommunicatorError)
        assert error.waiting_for == str(this_member(2))
    close(transports)


def test_closing_from_another_thread_ends_a_call():
    transports = group(2, timeout_s=10 * LIMIT_S)
    asleep = kernel.STRIDE + kernel._SLEEPS

    def close_when_asleep():
        while not transports[0]._kernel._words[asleep]:
            time.sleep(1e-4)
        transports[1].close()

    _, error = in_threads([close_when_asleep, lambda: transports[1].all_reduce(torch.ones(3))])
    assert "this communicator is closed" in str(error)
    close(transports)


@pytest.mark.parametrize(
    "operation", [SharedMemoryTransport.barrier, lambda transport: transport.all_reduce(torch.ones(3))]
)
def test_a_wait_ends_when_a_process_outside_of_the_group_is_lost(operation):
    """Rank 1 is alive, and never comes: it waits for that process, or has left another group because of it."""
    elsewhere, lost = replace(this_member(2), host_id="another"), threading.Event()

    def check(waited_s):
        if lost.is_set():
            raise MemberLostError("connect", 0, (elsewhere,), waited_s)

    transports = group(2, timeout_s=10 * LIMIT_S, check=check)

    def lose_when_asleep():
        while not transports[0]._kernel._words[kernel._SLEEPS]:
            time.sleep(1e-4)
        lost.set()

    error, _ = in_threads([lambda: operation(transports[0]), lose_when_asleep])
    assert isinstance(error, MemberLostError)
    assert error.lost == (elsewhere,)
    (late,) = in_threads([lambda: operation(transports[1])])
    assert "it left the group" in str(late)
    close(transports)


def be_interrupted(transport):
    """Rank 0 waits for a member that does not come, and is interrupted as by Ctrl-C."""
    if transport.rank == 0:
        set_default_signals()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            transport.all_reduce(torch.ones(100_000))
        except KeyboardInterrupt:
            try:
                transport.barrier()
            except CommunicatorError as error:
                return str(error)
        return None
    while not transport._barrier._words[waiting.GOODBYE]:
        time.sleep(1e-3)
    try:
        transport.all_reduce(torch.ones(100_000))
    except CommunicatorError as error:
        return str(error)
    return None


def test_an_interrupted_call_ends_at_once_and_for_all():
    mine, other = run_members(2, be_interrupted, timeout_s=60.0)
    assert "an earlier all_reduce was ended by KeyboardInterrupt()" in mine
    assert "it left the group" in other


def which_way(transport):
    ones = torch.ones(100_000)
    transport.all_reduce(ones)
    return transport._kernel is not None, ones[0].item()


@pytest.mark.parametrize(("without_compiler", "compiled"), [((), True), ((1,), False), ((0, 1, 2), False)])
def test_all_members_use_the_kernel_or_none(without_compiler, compiled):
    assert run_members(3, which_way, without_compiler=without_compiler) == [(compiled, 3.0)] * 3


def test_without_a_compiler_one_line_says_so_whatever_number_of_groups_there_is(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    kernel.library.cache_clear()
    kernels._log_once.cache_clear()
    segment = Segment.host(2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kernel.announce_kernel(segment.words, 0)
    kernel.library.cache_clear()
    assert len(caplog.messages) == 1
    assert "no C compiler (looked for no-such-compiler)" in caplog.messages[0]
    assert not kernel.all_members_have_kernel(segment.words, 2)
    segment.close()
