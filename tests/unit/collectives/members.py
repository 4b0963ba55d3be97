"""Runs a task on every member of a group: processes that connect as GMIs do, or threads for the in-process reference."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import torch

from actors.rendezvous_actor import RendezvousActor
from collectives.communicator import Communicator
from collectives.connect import connect
from collectives.layout import Layout
from collectives.rendezvous import Member, this_member
from tests.unit.collectives.thread_group import ThreadGroup
from tests.unit.forkserver import context

LIMIT_S = 60.0

Task = Callable[[Communicator, Any], Any]
"""``task(communicator, done)``: ``done`` is an event that all members share."""


@dataclass
class Failed:
    """A member's task raised."""

    error: Exception


def succeeded(answers: list[Any]) -> list[Any]:
    """The answers; raises what one of the members raised."""
    for answer in answers:
        if isinstance(answer, Failed):
            raise answer.error
    return answers


class _RendezvousManager(BaseManager):
    """Hosts the rendezvous in a separate process."""


_RendezvousManager.register("RendezvousActor", RendezvousActor)


def run_group(
    transport: str,
    world_size: int,
    task: Task,
    timeout_s: float = 30.0,
    *,
    composition: str = "auto",
    layout: str | None = None,
    who: Sequence[Callable[[int], Member]] | None = None,
) -> list[Any]:
    """The result of each rank's task; ``Failed`` if it raised, None if its process was killed.

    With a layout, members claim its nodes and devices, whatever host they run on; ``who`` makes the ``Member`` of each
    rank, in its process.
    """
    where = Layout.parse(layout) if layout is not None else Layout.from_counts([[world_size]])
    if transport == "inprocess":
        return _in_threads(where, composition, task, timeout_s)
    if who is None:
        places = where.places()
        who = [partial(_placed, place=places[rank] if layout else None) for rank in range(world_size)]
    settings = {
        "world_size": world_size,
        "timeout_s": timeout_s,
        "transport": transport,
        "composition": composition,
    }
    with _RendezvousManager(ctx=context) as manager:
        socket = Path(manager.address)  # a file, since members may be in other network namespaces
        socket.parent.chmod(0o755)  # or of other users
        socket.chmod(0o777)
        rendezvous = manager.RendezvousActor(world_size)
        done = context.Event()
        return answers_of(
            _member, [(rendezvous, rank, who[rank], settings, task, done) for rank in range(world_size)]
        )


def answers_of(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What processes answer through the pipe that ``target`` gets after its arguments; none is left running."""
    pipes = [context.Pipe(duplex=False) for _ in arguments]
    processes = [
        context.Process(target=target, args=(*own, sender))
        for own, (_, sender) in zip(arguments, pipes, strict=True)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return [_answer(receiver, process) for (receiver, _), process in zip(pipes, processes, strict=True)]
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
    who: Callable[[int], Member],
    settings: dict[str, Any],
    task: Task,
    done: Any,
    sender: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        with connect(rendezvous, who(rank), **settings) as communicator:
            _send(sender, task(communicator, done))
    except Exception as error:
        _send(sender, Failed(error))
    # Others may still be at work, and would take an ended process for a loss. ``answers_of`` kills it once all answered.
    threading.Event().wait(LIMIT_S)


def _placed(rank: int, place: tuple[int, int] | None) -> Member:
    member = this_member(rank)
    if place is None:
        return member
    node, device = place
    return replace(member, host_id=f"{member.host_id}/node {node}", device=f"device {device}")


def _send(sender: Any, answer: Any) -> None:
    """By plain pickle: multiprocessing's own sends descriptors of tensors, which end with the sender."""
    sender.send_bytes(pickle.dumps(answer))


def _in_threads(layout: Layout, composition: str, task: Task, timeout_s: float) -> list[Any]:
    group = ThreadGroup(layout, "ip_only" if composition == "auto" else composition, timeout_s)
    done = threading.Event()
    answers: list[Any] = [None] * layout.world_size

    def member(rank: int) -> None:
        try:
            with group.communicator(rank) as communicator:
                answers[rank] = task(communicator, done)
        except Exception as error:
            answers[rank] = Failed(error)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(layout.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return answers
