"""Runs a task in processes that share a rendezvous, from before they belong to any group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.unit.collectives.members import Failed, _answer, _context, _Meeting, _send

Task = Callable[[Any, int, Any], Any]
"""``task(rendezvous, number, event)``: ``event`` is shared by all."""


def run_processes(number: int, task: Task, *, world_size: int) -> list[Any]:
    """What each process's task returned, ``Failed`` where it raised, None where the process was killed."""
    with _Meeting(ctx=_context) as meeting:
        rendezvous = meeting.Collective(world_size)
        event = _context.Event()
        pipes = [_context.Pipe(duplex=False) for _ in range(number)]
        processes = [
            _context.Process(target=_live, args=(rendezvous, index, task, event, pipes[index][1]))
            for index in range(number)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            return [
                _answer(receiver, process) for (receiver, _), process in zip(pipes, processes, strict=True)
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _live(rendezvous: Any, index: int, task: Task, event: Any, sender: Any) -> None:
    torch.set_num_threads(1)
    try:
        _send(sender, task(rendezvous, index, event))
    except Exception as error:
        _send(sender, Failed(error))
