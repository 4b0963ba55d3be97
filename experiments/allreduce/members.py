"""Processes of one host that measure collectives together, and what each case does."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.rendezvous import Member, this_member
from collectives.transports.base import combine
from collectives.transports.gloo import GlooStore
from collectives.transports.shm import Segment, SharedMemoryTransport
from collectives.transports.shm.kernel import Operation, library, reduction
from collectives.transports.shm.prepared_reductions import chunk_elements, chunks

TIMEOUT_S = 120.0
REDUCING = ("gloo", "staged", "registered")
ALONE = ("one process", "one process, compiled")
CASES = (*REDUCING, *ALONE, "memcpy", "memcpy from neighbour")


@dataclass(frozen=True)
class Run:
    """One case to measure, on every member."""

    case: str
    numel: int
    iterations: int


@dataclass(frozen=True)
class Times:
    """Begin and end of each iteration on one member, in seconds on the host's clock, and the CPU time of all."""

    begins: list[float]
    ends: list[float]
    cpu_s: float


class Group:
    """Starts the members, asks them to measure, and ends them."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, pipe, [ours for ours, _ in pipes]), daemon=True)
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()
        members = tuple(pipe.recv() for pipe in self._pipes)
        self._tell(members)
        endpoints = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(endpoints)

    def measure(self, run: Run) -> tuple[list[float], float]:
        """Seconds from the first member's begin to the last one's end for each iteration; CPU seconds of all members."""
        self._tell(run)
        answers: list[Times] = [pipe.recv() for pipe in self._pipes]
        took_part = [answer for answer in answers if answer.begins]
        begins = zip(*(answer.begins for answer in took_part), strict=True)
        ends = zip(*(answer.ends for answer in took_part), strict=True)
        spans = [max(last) - min(first) for first, last in zip(begins, ends, strict=True)]
        return spans, sum(answer.cpu_s for answer in answers)

    def close(self) -> None:
        """End the members."""
        self._tell(None)
        for process in self._processes:
            process.join(TIMEOUT_S)

    def _tell(self, message: object) -> None:
        for pipe in self._pipes:
            pipe.send(message)


def _serve(rank: int, pipe: Connection, others: list[Connection]) -> None:
    for other in others:
        other.close()
    torch.set_num_threads(1)
    pipe.send(this_member(rank))
    bench = _Bench(rank, pipe.recv(), pipe)
    while (run := pipe.recv()) is not None:
        pipe.send(bench.measure(run))
    bench.close()


class _Bench:
    """One member, with both transports."""

    def __init__(self, rank: int, members: tuple[Member, ...], pipe: Connection) -> None:
        self._rank, self._world_size = rank, len(members)
        if rank == 0:
            segment, store = Segment.host(len(members)), GlooStore.host(members, TIMEOUT_S)
            pipe.send((segment.endpoint, store.endpoint))
        else:
            segment_at, store_at = pipe.recv()
            segment = Segment.attach(segment_at, len(members), rank)
            store = GlooStore.connect(store_at, rank, TIMEOUT_S)
        self._shared = SharedMemoryTransport(segment, members, rank, TIMEOUT_S)
        # What a user would call: torch.distributed on its own default group.
        dist.init_process_group("gloo", store=store.store, rank=rank, world_size=len(members))
        self._registered = torch.empty(0)
        self._neighbours = torch.empty(0)
        self._private: list[Tensor] = []

    def close(self) -> None:
        self._shared.close()
        dist.destroy_process_group()

    def measure(self, run: Run) -> Times:
        """Every iteration begins with tensors that their own member has just written, and a barrier."""
        self._hold(run.numel)
        inputs, work = self._case(run.case)
        alone = run.case in ALONE
        begins, ends, cpu_s = [], [], time.process_time()
        for _ in range(run.iterations if self._rank == 0 or not alone else 0):
            for tensor in inputs:
                tensor.fill_(self._rank + 1.0)
            if not alone:
                self._shared.barrier()
            begins.append(time.perf_counter())
            work()
            ends.append(time.perf_counter())
            os.sched_yield()  # where members share a core, those that come to the end see it before the next iteration
        cpu_s = time.process_time() - cpu_s
        self._shared.barrier()
        self._check(run, inputs)
        return Times(begins, ends, cpu_s)

    def _hold(self, numel: int) -> None:
        """Memory for tensors of this size, made before it is measured."""
        if self._registered.numel() != numel:
            self._registered = self._shared.buffer(numel, torch.float32)
            place = self._shared._numbers[self._registered.data_ptr()]
            self._neighbours = self._shared._views(place, self._registered)[self._rank - 1]
            padded = -(-numel // 16) * 16
            self._private = [row[:numel] for row in torch.ones(self._world_size, padded)]

    def _case(self, name: str) -> tuple[list[Tensor], Callable[[], object]]:
        """What this member writes before each iteration, and what is timed."""
        private, registered = self._private, self._registered
        if name == "gloo":
            return private[:1], lambda: dist.all_reduce(private[0])
        if name == "staged":
            return private[:1], lambda: self._shared.all_reduce(private[0])
        if name == "registered":
            return [registered], lambda: self._shared.all_reduce(registered)
        if name == "one process":
            size = chunk_elements("sum", torch.float32)
            parts = [[tensor[chunk] for tensor in private] for chunk in chunks(0, registered.numel(), size)]
            return private, lambda: self._reduce_all(parts)
        if name == "one process, compiled":
            everything = reduction(
                "two_shot", 0, "sum", torch.float32, len(registered), private, self._world_size
            )
            return private, lambda: self._reduce_all_compiled(everything)
        source = registered if name == "memcpy" else self._neighbours
        to, start, size = private[0].data_ptr(), source.data_ptr(), source.nbytes
        return [registered], lambda: ctypes.memmove(to, start, size)

    def _reduce_all(self, chunks: list[list[Tensor]]) -> None:
        """What all members of "registered" do together, by this one alone and on its own memory."""
        for parts in chunks:
            combine(parts, parts[0], "sum")
            for part in parts[1:]:
                part.copy_(parts[0])

    def _reduce_all_compiled(self, everything: Operation) -> None:
        """The same by the compiled kernel: every member's share."""
        program = library()
        assert program is not None, "no compiler"
        for rank in range(self._world_size):
            program.reduce_share(everything.at, self._world_size, rank)

    def _check(self, run: Run, inputs: list[Tensor]) -> None:
        """The results are right: rank r gave r + 1; alone, rank 0 gave 1 for each member."""
        if run.case in REDUCING:
            expected = self._world_size * (self._world_size + 1) / 2
        elif run.case in ALONE and self._rank == 0:
            expected = float(self._world_size)
        else:
            return
        for tensor in inputs:
            if not (tensor == expected).all():
                raise RuntimeError(f"{run.case} on rank {self._rank}: expected {expected} everywhere")
