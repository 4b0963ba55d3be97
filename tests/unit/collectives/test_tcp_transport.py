"""TCP between members that are threads: strangers at the door, calls that differ, closing meanwhile, sums by hand."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from collectives.errors import CommunicatorError, MismatchedCallError
from collectives.rendezvous import poll, this_member
from collectives.transports import tcp
from collectives.transports.base import TransportGroup
from collectives.transports.tcp import connect

LIMIT_S = 20.0


class Board:
    """Texts by key, as a rendezvous has them."""

    def __init__(self):
        self.texts = {}

    def publish(self, key, text):
        self.texts[key] = text

    def published(self, member, key):
        return poll(lambda: self.texts.get(key), LIMIT_S)


def group(board, rank, world_size, timeout_s=LIMIT_S):
    return TransportGroup(
        members=[this_member(each) for each in range(world_size)],
        rank=rank,
        key="ip 0-n",
        device=torch.device("cpu"),
        timeout_s=timeout_s,
        check=lambda waited_s: None,
        publish=board.publish,
        published=board.published,
    )


def together(*tasks):
    """Results in order, or the errors that were raised."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        futures = [pool.submit(task) for task in tasks]
        return [future.exception(LIMIT_S) or future.result() for future in futures]


@pytest.fixture
def members(request):
    board = Board()
    found = together(*(partial(connect, group(board, rank, request.param)) for rank in range(request.param)))
    yield found
    for each in found:
        each.close()


@pytest.mark.parametrize("members", [2, 3, 5], indirect=True)
@pytest.mark.parametrize(
    "numel", [1, 4, 3_000_001]
)  # fewer elements than members; more than a connection's buffers
def test_sums_are_in_rank_order_bit_for_bit(members, numel):
    generator = torch.Generator().manual_seed(numel)
    given = [torch.randn(numel, generator=generator) * 10.0 ** (9 * rank - 9) for rank in range(len(members))]
    tensors = [each.clone() for each in given]
    together(*(partial(member.all_reduce, tensor) for member, tensor in zip(members, tensors, strict=True)))
    expected = given[0].clone()
    for each in given[1:]:
        expected += each
    for tensor in tensors:
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("members", [3], indirect=True)
def test_tiny_huge_and_missing_numbers(members):
    given = [
        torch.tensor([1e-40, 1e30, float("nan"), float("inf"), 1.0]),
        torch.tensor([1e-40, 1e30, 1.0, -1.0, 2.0]),
        torch.tensor([1e-40, 3e38, 1.0, 1.0, 4.0]),
    ]
    tensors = [each.clone() for each in given]
    together(*(partial(member.all_reduce, tensor) for member, tensor in zip(members, tensors, strict=True)))
    assert all(torch.equal(each.nan_to_num(-1.0), tensors[0].nan_to_num(-1.0)) for each in tensors)
    assert tensors[0][0] == torch.tensor(1e-40) + torch.tensor(1e-40) + torch.tensor(1e-40) > 0
    assert tensors[0][2].isnan()
    assert tensors[0][3].isinf()
    assert tensors[0][4] == 7.0


@pytest.mark.parametrize("members", [3], indirect=True)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_members_that_call_with_other_sizes_all_say_so_and_keep_their_tensors(members, odd):
    sizes = [7 if rank == odd else 2_000_000 for rank in range(3)]
    tensors = [torch.full((size,), float(rank)) for rank, size in enumerate(sizes)]
    errors = together(*(partial(m.all_reduce, t) for m, t in zip(members, tensors, strict=True)))
    for rank, (error, tensor) in enumerate(zip(errors, tensors, strict=True)):
        # A member may find the connection of one that has compared already closed: its own error is then that.
        assert isinstance(error, CommunicatorError)
        assert torch.equal(tensor, torch.full((sizes[rank],), float(rank)))
    assert any(isinstance(error, MismatchedCallError) for error in errors)
    with pytest.raises(CommunicatorError, match="an earlier all_reduce failed"):
        members[0].barrier()


@pytest.mark.parametrize("members", [2], indirect=True)
def test_another_thread_that_closes_ends_a_wait(members):
    waiting = threading.Event()

    def wait():
        waiting.set()
        members[0].all_reduce(torch.ones(10))

    def close():
        waiting.wait(LIMIT_S)
        poll(lambda: members[0]._is_running or None, LIMIT_S)
        members[0].close()

    begin = time.monotonic()
    error, _ = together(wait, close)
    assert isinstance(error, CommunicatorError)
    assert "closed" in error.detail
    assert time.monotonic() - begin < LIMIT_S / 2
    (error,) = together(partial(members[1].all_reduce, torch.ones(10)))
    assert isinstance(error, CommunicatorError)
    assert error.awaited == (this_member(0),)


@pytest.mark.parametrize("members", [2], indirect=True)
def test_an_interrupted_operation_is_not_continued_by_the_next_one(members):
    def interrupt(waited_s):
        raise KeyboardInterrupt

    members[0]._check = interrupt
    with pytest.raises(KeyboardInterrupt):
        members[0].all_reduce(torch.ones(10))
    with pytest.raises(CommunicatorError, match="an earlier all_reduce failed: KeyboardInterrupt"):
        members[0].all_reduce(torch.ones(10))
    with pytest.raises(CommunicatorError, match="closed its connection"):
        members[1].all_reduce(torch.ones(10))


class Clock(threading.local):
    """Each look at it takes 0.05 s."""

    now = 0.0

    def monotonic(self):
        self.now += 0.05
        return self.now


class Narrow:
    """A connection that brings 64 KB and then nothing until one asks again."""

    def __init__(self, connection):
        self.connection, self.is_dry = connection, False

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def recv_into(self, view):
        self.is_dry = not self.is_dry
        if not self.is_dry:
            raise BlockingIOError
        return self.connection.recv_into(view[:65536])


@pytest.mark.parametrize("members", [2], indirect=True)
def test_the_time_limit_is_of_a_wait_and_not_of_a_large_tensor(members, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tcp, "time", clock)

    def reduce(member):
        member._timeout_s = 3.0
        (peer,) = member._peers.values()
        peer.socket = Narrow(peer.socket)
        tensor = torch.ones(4_000_000)
        member.all_reduce(tensor)
        return tensor, clock.now

    for tensor, took_s in together(*(partial(reduce, member) for member in members)):
        assert torch.equal(tensor, torch.full((4_000_000,), 2.0))
        assert took_s > 3.0


def test_a_member_that_does_not_come_in_time_is_named():
    board = Board()
    (error,) = together(partial(connect, group(board, 0, 3, timeout_s=0.3)))
    assert isinstance(error, CommunicatorError)
    assert error.awaited == (this_member(1), this_member(2))
    assert "within 0.3 s" in error.detail


def test_strangers_are_not_members():
    board = Board()

    def address():
        _, port, host = board.published(None, "ip 0-n at 0").split(maxsplit=2)
        return host, int(port)

    def members_after(*knocks):
        strangers = []
        for knock in knocks:
            strangers.append(socket.create_connection(address(), timeout=LIMIT_S))
            strangers[-1].sendall(knock)
        other = connect(group(board, 1, 2))
        for stranger in strangers:
            stranger.close()
        return other

    def first():
        return connect(group(board, 0, 2))

    # Nothing; a part of a hello; a wrong token with the right rank; far too much.
    knocks = (b"", b"abc", bytes(16) + (1).to_bytes(4, "big"), bytes(100_000))
    found = together(first, partial(members_after, *knocks))
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    together(*(partial(m.all_reduce, t) for m, t in zip(found, tensors, strict=True)))
    assert tensors[0].tolist() == tensors[1].tolist() == [11.0, 22.0]
    for each in found:
        each.close()
        each.close()  # again
