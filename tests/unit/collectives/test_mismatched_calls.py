"""Members that call different operations all get an error that names both calls, over every transport, and no data moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from members import run_group

from collectives.communicator import Communicator
from collectives.errors import CommunicatorError

Call = Callable[[Communicator], Any]


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


# What rank 0 calls and what the others call, each with the words that its error must hold.
CASES: dict[str, tuple[Call, str, Call, str]] = {
    "sizes": (
        lambda c: c.all_reduce(floats(10)),
        "all_reduce(sum) of 10 float32",
        lambda c: c.all_reduce(floats(20)),
        "all_reduce(sum) of 20 float32",
    ),
    "nothing and something": (
        lambda c: c.all_reduce(floats(0)),
        "all_reduce(sum) of 0 float32",
        lambda c: c.all_reduce(floats(5)),
        "all_reduce(sum) of 5 float32",
    ),
    "operators": (
        lambda c: c.all_reduce(floats(6)),
        "all_reduce(sum) of 6 float32",
        lambda c: c.all_reduce(floats(6), "max"),
        "all_reduce(max) of 6 float32",
    ),
    "types of one width": (
        lambda c: c.all_reduce(torch.ones(6, dtype=torch.int64)),
        "all_reduce(sum) of 6 int64",
        lambda c: c.all_reduce(torch.ones(6, dtype=torch.float64)),
        "all_reduce(sum) of 6 float64",
    ),
    "broadcasts": (
        lambda c: c.broadcast(floats(10)),
        "broadcast(source=0) of 10 float32",
        lambda c: c.broadcast(floats(20)),
        "broadcast(source=0) of 20 float32",
    ),
    "sources": (
        lambda c: c.broadcast(floats(10), 0),
        "broadcast(source=0) of 10 float32",
        lambda c: c.broadcast(floats(10), 1),
        "broadcast(source=1) of 10 float32",
    ),
    "kinds": (
        lambda c: c.barrier(),
        "barrier",
        lambda c: c.reduce_scatter(floats(4)),
        "reduce_scatter(sum) of 4 float32",
    ),
    "gathers": (
        lambda c: c.all_gather(floats(3)),
        "all_gather of 3 float32",
        lambda c: c.all_gather(floats(4)),
        "all_gather of 4 float32",
    ),
    "reductions to one": (
        lambda c: c.reduce(floats(3)),
        "reduce(sum) of 3 float32",
        lambda c: c.reduce_scatter(floats(3)),
        "reduce_scatter(sum) of 3 float32",
    ),
}


def error_text(call: Call, communicator: Communicator) -> str:
    try:
        call(communicator)
    except CommunicatorError as error:
        return str(error)
    return "no error"


def call_differently(communicator: Communicator, done: Any, *, name: str) -> tuple[str, float]:
    first, _, other, _ = CASES[name]
    begin = time.monotonic()
    text = error_text(first if communicator.rank == 0 else other, communicator)
    return text, time.monotonic() - begin


@pytest.mark.parametrize("transport", ["inprocess", "shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_both_calls_are_named_on_all_members(transport, name):
    _, first, _, other = CASES[name]
    for text, seconds in run_group(transport, 3, partial(call_differently, name=name), timeout_s=30.0):
        assert first in text
        assert other in text
        assert seconds < 15.0  # by comparison, not by the time limit


def lists_of_equal_total(communicator: Communicator, done: Any) -> tuple[str, list[float]]:
    sizes = (3, 4) if communicator.rank == 0 else (4, 3)
    tensors = [torch.full((size,), float(communicator.rank)) for size in sizes]
    text = error_text(lambda c: c.all_reduce(tensors), communicator)
    return text, torch.cat(tensors).tolist()


@pytest.mark.parametrize("transport", ["inprocess", "shm", "tcp"])
def test_lists_of_other_shapes_and_equal_total_are_not_mixed(transport):
    for rank, (text, values) in enumerate(run_group(transport, 2, lists_of_equal_total)):
        own = "(3,), (4,)" if rank == 0 else "(4,), (3,)"
        assert f"rank {rank} called all_reduce(sum) of a list of float32 of shapes {own}" in text
        assert values == [float(rank)] * 7


def adjacent_lists(communicator: Communicator, done: Any) -> str:
    buffer = communicator.buffer(7, torch.float32)
    split = 3 if communicator.rank == 0 else 4
    return error_text(lambda c: c.all_reduce([buffer[:split], buffer[split:]]), communicator)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_so_are_lists_that_are_views_of_one_buffer(transport):
    for text in run_group(transport, 2, adjacent_lists):
        assert "all_reduce(sum) of a list of float32 of shapes" in text


def one_differs(communicator: Communicator, done: Any) -> str:
    communicator.all_reduce(floats(5))
    return error_text(lambda c: c.all_reduce(floats(30 if c.rank == 3 else 40)), communicator)


@pytest.mark.parametrize(("layout", "composition"), [("2x1x2", "auto"), ("2+2", "har")])
def test_members_of_other_groups_of_a_schedule_get_both_calls_too(layout, composition):
    """Two nodes or devices of two: only ranks 2 and 3 reduce beside each other."""
    for text in run_group("auto", 4, one_differs, layout=layout, composition=composition):
        assert "of 30 float32" in text
        assert "of 40 float32" in text


def other_groups(communicator: Communicator, done: Any) -> str:
    return error_text(lambda c: c.group([0, 1] if c.rank < 2 else [0, 2]), communicator)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_groups_of_other_members_are_refused(transport):
    for text in run_group(transport, 3, other_groups):
        assert "[0, 1]" in text
        assert "[0, 2]" in text


def same_again(communicator: Communicator, done: Any) -> list[float]:
    tensors = [torch.full((3,), 1.0 + communicator.rank), torch.full((2, 2), 2.0)]
    communicator.all_reduce(tensors)
    communicator.all_reduce(tensors[::-1])
    return torch.cat([tensor.view(-1) for tensor in tensors]).tolist()


@pytest.mark.parametrize("transport", ["inprocess", "shm", "tcp"])
def test_members_that_call_the_same_are_not_disturbed(transport):
    # 1 + 2 = 3, doubled by the second sum; 2 + 2 = 4, doubled.
    assert run_group(transport, 2, same_again) == [[6.0] * 3 + [8.0] * 4] * 2
