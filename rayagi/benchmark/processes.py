"""Benchmark members in processes of this machine, without Ray: parallel method calls on one object per process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseManager
from multiprocessing.process import BaseProcess
from typing import Any

from actors.rendezvous_actor import RendezvousActor
from collectives.closing import ClosesOnExit
from collectives.rendezvous import Rendezvous
from collectives.transports.registry import TRANSPORTS
from rayagi.benchmark.measure import MemberEndedError
from rayagi.benchmark.member import BenchMember

ANSWER_LIMIT_S = 300.0
"""For one answer, whatever the request. Generous: it only ends calls that hang."""
_END_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Failed:
    """The request raised an error."""

    error: Exception


class _RendezvousManager(BaseManager):
    """Hosts the rendezvous in a separate process."""


_RendezvousManager.register("RendezvousActor", RendezvousActor)


class MemberProcesses(ClosesOnExit):
    """One object per process, and their rendezvous. ``close`` ends all processes."""

    def __init__(self, makers: Sequence[Callable[[], BenchMember]]) -> None:
        """Start the processes; ``makers`` (picklable) create the objects in them.

        Raises:
            Exception: raised by a maker.
        """
        context = multiprocessing.get_context("forkserver")
        # Once, not in every process.
        modules = ("torch", "collectives.transport_factory", *(each.module for each in TRANSPORTS))
        context.set_forkserver_preload(list(modules))
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        with ExitStack() as undo:
            undo.callback(self._end)
            manager = _RendezvousManager(ctx=context)
            manager.start(_end_with_parent)
            undo.enter_context(manager)
            self.rendezvous: Rendezvous = manager.RendezvousActor(len(makers))  # type: ignore[attr-defined]
            for maker in makers:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(maker, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._answers("start")
            self._undo = undo.pop_all()

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all objects in parallel; returns the results, by rank.

        Raises:
            MemberEndedError: a process ended, or did not answer within ANSWER_LIMIT_S.
            Exception: raised by the method.
        """
        request = pickle.dumps((method, arguments))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(request)
            except OSError:
                raise MemberEndedError(rank, method, "had already ended") from None
        return self._answers(method)

    def close(self) -> None:
        """End the processes. Safe to call twice."""
        self._undo.close()

    def _answers(self, asked: str) -> list[Any]:
        deadline = time.monotonic() + ANSWER_LIMIT_S
        answers = [self._answer(rank, asked, deadline) for rank in range(len(self._pipes))]
        # A process that ended is the cause of the others' errors: raise that first.
        errors = [answer.error for answer in answers if isinstance(answer, _Failed)]
        for error in sorted(errors, key=lambda error: not isinstance(error, MemberEndedError)):
            raise error
        return answers

    def _answer(self, rank: int, asked: str, deadline: float) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return _Failed(MemberEndedError(rank, asked, f"did not answer within {ANSWER_LIMIT_S:.0f} s"))
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):  # reset: it had not read all
            self._processes[rank].join(_END_LIMIT_S)
            code = self._processes[rank].exitcode
            return _Failed(MemberEndedError(rank, asked, f"its process ended with exit code {code}"))

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # idle processes end by themselves
        deadline = time.monotonic() + _END_LIMIT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()


def _end_with_parent() -> None:
    """End this process with the one that has started it: a manager's would stay if that one is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


def _serve(maker: Callable[[], BenchMember], pipe: Connection) -> None:
    """Serve requests until the pipe is closed, which also happens when the parent ends in any way."""
    # Ctrl-C goes to every process of a terminal, and SIGTERM of `timeout` to its whole group: the parent handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        made = maker()
    except Exception as error:
        pipe.send_bytes(pickle.dumps(_Failed(error)))
        return
    with closing(made):
        answer: Any = None
        while True:
            try:
                pipe.send_bytes(pickle.dumps(answer))
                method, arguments = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                answer = getattr(made, method)(*arguments)
            except Exception as error:
                answer = _Failed(error)
