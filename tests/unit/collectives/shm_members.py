"""Runs a task on every member of a shared-memory group, each a process of its own, with the compiled kernel or without."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection
from typing import Any

import torch

from collectives.rendezvous import this_member
from collectives.transports.shm import Segment, SharedMemoryTransport
from tests.unit.forkserver import context

LIMIT_S = 120.0

Task = Callable[[SharedMemoryTransport], Any]


def run_members(
    world_size: int, task: Task, timeout_s: float = 30.0, without_compiler: Collection[int] = ()
) -> list[Any]:
    """What each rank's task returned, the exception that it raised, None where its process was killed.

    Where a rank finds no compiler, all members do without the kernel.
    """
    pipes = [context.Pipe() for _ in range(world_size)]
    processes = [
        context.Process(target=_member, args=(rank, task, timeout_s, rank not in without_compiler, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    ours = [pipe for pipe, _ in pipes]
    try:
        members = [_receive(pipe) for pipe in ours]
        for pipe in ours:
            pipe.send(members)
        endpoint = _receive(ours[0])
        for pipe in ours[1:]:
            pipe.send(endpoint)
        return [_receive(pipe) for pipe in ours]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Any) -> Any:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a member is still at work after {LIMIT_S} s")
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _member(rank: int, task: Task, timeout_s: float, compiler: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    if not compiler:
        os.environ["CC"] = "no-such-compiler"
    try:
        _send(pipe, this_member(rank))
        members = pipe.recv()
        if rank == 0:
            segment = Segment.host(len(members))
            _send(pipe, segment.endpoint)
        else:
            segment = Segment.attach(pipe.recv(), len(members), rank)
        with SharedMemoryTransport(segment, members, rank, timeout_s) as transport:
            _send(pipe, task(transport))
    except Exception as error:
        _send(pipe, error)


def _send(pipe: Any, answer: Any) -> None:
    """By plain pickle: multiprocessing's own sends descriptors of tensors, which end with the sender."""
    pipe.send_bytes(pickle.dumps(answer))
