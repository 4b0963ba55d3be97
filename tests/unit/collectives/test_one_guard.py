"""Every operation of a communicator names the lost member and marks the communicator broken: all share one guard."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from members import run_group

from collectives.communicator import Communicator
from collectives.composed import ComposedCommunicator
from collectives.errors import CommunicatorError, MemberLostError


def _list(communicator: Communicator) -> list[torch.Tensor]:
    return [torch.ones(3), torch.ones(40_000)]


OPERATIONS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda c: c.all_reduce(torch.ones(9)),
    "all_reduce of a list": lambda c: c.all_reduce(_list(c)),
    "all_reduce_async": lambda c: c.all_reduce_async(_list(c)).wait(),
    "reduce": lambda c: c.reduce(torch.ones(9)),
    "reduce_scatter": lambda c: c.reduce_scatter(torch.ones(9)),
    "all_gather": lambda c: c.all_gather(torch.ones(9)),
    "broadcast": lambda c: c.broadcast(torch.ones(9), 1),
    "barrier": lambda c: c.barrier(),
    "send": lambda c: c.send(torch.ones(9), 1 - c.rank).wait(),
    "recv": lambda c: c.recv(1 - c.rank),
    "buffer": lambda c: c.buffer(9, torch.float32),
    "group": lambda c: c.group([0, 1]),
}
LOCAL = {"close"}
"""They wait for no other member."""
OF_SHARED_MEMORY = {"buffer"}
"""Elsewhere they are local, too."""


def test_the_table_names_every_operation():
    public = {
        name for name, value in vars(ComposedCommunicator).items() if callable(value) and name[0] != "_"
    }
    assert {name.split()[0] for name in OPERATIONS} | LOCAL == public


def survive(communicator: Communicator, done: Any, *, name: str) -> tuple[list[int], str]:
    communicator.barrier()
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        OPERATIONS[name](communicator)
    except MemberLostError as error:
        lost = [member.rank for member in error.lost]
    try:
        communicator.barrier()
    except CommunicatorError as later:
        return lost, later.detail
    return lost, "not broken"


@pytest.mark.parametrize(
    ("transport", "name"),
    [
        *(("shm", name) for name in OPERATIONS),
        *(
            pytest.param("tcp", name, marks=pytest.mark.slow)
            for name in OPERATIONS
            if name not in OF_SHARED_MEMORY
        ),
    ],
)
def test_a_death_in_any_operation_is_named_and_breaks_the_communicator(transport, name):
    answer, killed = run_group(transport, 2, partial(survive, name=name))
    assert killed is None
    lost, later = answer
    assert lost == [1]
    assert later.startswith("an earlier ")
