"""Runs a task in processes that share a rendezvous, from before they belong to any group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.unit.collectives.members import Failed, _RendezvousManager, _send, answers_of
from tests.unit.forkserver import context

Task = Callable[[Any, int, Any], Any]
"""``task(rendezvous, number, event)``: ``event`` is shared by all."""


def run_processes(number: int, task: Task, *, world_size: int, actor: str = "RendezvousActor") -> list[Any]:
    """What each process's task returned, ``Failed`` where it raised, None where the process was killed."""
    with _RendezvousManager(ctx=context) as manager:
        rendezvous = getattr(manager, actor)(world_size)
        event = context.Event()
        return answers_of(_live, [(rendezvous, index, task, event) for index in range(number)])


def _live(rendezvous: Any, index: int, task: Task, event: Any, sender: Any) -> None:
    torch.set_num_threads(1)
    try:
        _send(sender, task(rendezvous, index, event))
    except Exception as error:
        _send(sender, Failed(error))
