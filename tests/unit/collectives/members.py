"""Runs a task on every member of a group: processes that connect as GMIs do, or threads for the in-process reference."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from typing import Any

import torch

from actors.collective import Collective
from collectives.communicator import Communicator
from collectives.connect import connect
from collectives.rendezvous import this_member
from collectives.transports.inprocess import InProcessGroup

LIMIT_S = 60.0

Task = Callable[[Communicator, Any], Any]
"""``task(communicator, done)``: ``done`` is an event that all members share."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch"])


@dataclass
class Failed:
    """A member's task raised."""

    error: Exception


class _Meeting(BaseManager):
    """Hosts the collective in a process of its own."""


_Meeting.register("Collective", Collective)


def run_group(transport: str, world_size: int, task: Task, timeout_s: float = 30.0) -> list[Any]:
    """What each rank's task returned, ``Failed`` where it raised, None where its process was killed."""
    if transport == "inprocess":
        return _in_threads(world_size, task, timeout_s)
    with _Meeting(ctx=_context) as meeting:
        rendezvous = meeting.Collective(world_size)
        done = _context.Event()
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(
                target=_member,
                args=(rendezvous, rank, world_size, transport, timeout_s, task, done, pipes[rank][1]),
            )
            for rank in range(world_size)
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


def _answer(receiver: Any, process: Any) -> Any:
    if not receiver.poll(LIMIT_S):
        raise TimeoutError(f"member {process.pid} is still at work after {LIMIT_S} s")
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None


def _member(
    rendezvous: Any,
    rank: int,
    world_size: int,
    transport: Any,
    timeout_s: float,
    task: Task,
    done: Any,
    sender: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        with connect(
            rendezvous, this_member(rank), world_size=world_size, timeout_s=timeout_s, transport=transport
        ) as communicator:
            _send(sender, task(communicator, done))
    except Exception as error:
        _send(sender, Failed(error))


def _send(sender: Any, answer: Any) -> None:
    """By plain pickle: multiprocessing's own sends descriptors of tensors, which end with the sender."""
    sender.send_bytes(pickle.dumps(answer))


def _in_threads(world_size: int, task: Task, timeout_s: float) -> list[Any]:
    group = InProcessGroup(world_size, timeout_s)
    done = threading.Event()
    answers: list[Any] = [None] * world_size

    def member(rank: int) -> None:
        try:
            with group.communicator(rank) as communicator:
                answers[rank] = task(communicator, done)
        except Exception as error:
            answers[rank] = Failed(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return answers
