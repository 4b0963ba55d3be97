"""Suspends a member inside an operation until the others have given it up, and looks at what it does when it goes on.

    python -m experiments.allreduce.suspension --rounds 280
    python -m experiments.allreduce.suspension --rounds 140 --without-compiler
    python -m experiments.allreduce.suspension --rounds 120 --transport gloo

A round: three processes repeat an operation: on a registered buffer, a list of tensors, a tensor of their own, memory in
common, a compiled program's, in a group of all members in another order, or all of these by turns. One is suspended
(SIGSTOP) at a random moment. The others time out, and fill what they keep with another number. Then it goes on (SIGCONT). A
round fails if it completes an operation that the others gave up, or, in shared memory, if any two members complete
different numbers of them; if one of the others named anybody but the one that was suspended; or if anything that they had
filled has changed. Writes results/suspension.json.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.rendezvous_actor import RendezvousActor
from collectives import transport_factory
from collectives.communicator import Communicator
from collectives.connect import connect
from collectives.errors import CommunicatorError
from collectives.rendezvous import this_member
from collectives.transport_factory import TransportName
from collectives.transports import gloo, tcp
from experiments.scripts import command_line, origin, write_results

HERE = Path(__file__).parent
WORLD_SIZE = 3
SIZES = (1_216, 30_000, 440_000, 4_000_000)
"""Elements of float32."""
KINDS = ("registered", "mixed", "scatter", "list", "own", "broadcast", "group")
"""Of operations. Only who shares memory has the last."""
GROUP = (2, 0, 1)
"""Ranks whose places in the group are others than in the whole."""
FILL = 7.5
"""What no reduction of ones gives."""
TIMEOUT_S = 0.3
"""After which the others give up."""
LIMIT_S = 60.0
LONGEST_DELAY_S = 0.1
"""Within which the member is suspended, after all have begun."""
NO_COMPILER = "no-such-compiler"


class _Host(BaseManager):
    """Hosts the rendezvous in a process of its own."""


_Host.register("RendezvousActor", RendezvousActor)


@dataclass(frozen=True)
class Round:
    """What one round found."""

    number: int
    kind: str
    numel: int
    victim: int
    in_memory: bool
    """Whether they share memory, and with it whether an operation is complete."""
    errors: tuple[str, ...]
    """The text of each member's error, by rank."""
    num_complete: tuple[int, ...]
    """Operations that each member completed, by rank."""
    num_changed: tuple[int, ...]
    """Elements that changed after a member had filled them, by rank; the suspended member fills none."""

    @property
    def problems(self) -> list[str]:
        """What is wrong; empty if nothing is."""
        found = []
        others = [count for rank, count in enumerate(self.num_complete) if rank != self.victim]
        own = self.num_complete[self.victim]
        if own > max(others) or (self.in_memory and (own < max(others) or len(set(others)) > 1)):
            found.append(f"round {self.number}: members completed {self.num_complete} operations")
        for rank, error in enumerate(self.errors):
            if rank != self.victim and f"waiting for rank {self.victim} " not in error:
                found.append(
                    f"round {self.number}: rank {self.victim} was suspended, and rank {rank} says: {error}"
                )
        if any(self.num_changed):
            found.append(
                f"round {self.number}: {self.num_changed} elements changed after they had been filled"
            )
        return found


def run(
    num_rounds: int,
    *,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    without_compiler: bool = False,
    transport: TransportName = "shm",
    seed: int = 0,
) -> list[Round]:
    """Play so many rounds; kinds and sizes take turns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "actors.rendezvous_actor", __name__])
    generator = random.Random(seed)
    with _Host(ctx=context) as host:
        pipes, processes = [], []
        for rank in range(WORLD_SIZE):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_live, args=(rank, theirs, transport, without_compiler), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            rounds = []
            for number in range(num_rounds):
                kind = kinds[number % len(kinds)]
                numel = sizes[number // len(kinds) % len(sizes)]
                rendezvous = host.RendezvousActor(WORLD_SIZE)  # type: ignore[attr-defined]
                victim = generator.randrange(WORLD_SIZE)
                for rank, pipe in enumerate(pipes):
                    pipe.send((rendezvous, kind, numel, rank != victim))
                delay_s = generator.uniform(0.0, LONGEST_DELAY_S)
                rounds.append(
                    Round(
                        number,
                        kind,
                        numel,
                        victim,
                        transport == "shm",
                        *_suspend(victim, delay_s, processes, pipes),
                    )
                )
            return rounds
        finally:
            for process in processes:
                process.kill()
                process.join()


def _suspend(
    victim: int, delay_s: float, processes: Sequence[Any], pipes: Sequence[Any]
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Suspend a member while all are at work. Returns the last three of a ``Round``."""
    others = [rank for rank in range(WORLD_SIZE) if rank != victim]
    for pipe in pipes:
        _receive(pipe)
    time.sleep(delay_s)  # into the middle of whatever they do
    os.kill(processes[victim].pid, signal.SIGSTOP)
    ended = {rank: _receive(pipes[rank]) for rank in others}  # and have filled their tensors
    os.kill(processes[victim].pid, signal.SIGCONT)
    ended[victim] = _receive(pipes[victim])
    for pipe in pipes:
        pipe.send("look")
    num_changed = tuple(_receive(pipe) for pipe in pipes)
    errors = tuple(ended[rank][1] for rank in range(WORLD_SIZE))
    return errors, tuple(ended[rank][0] for rank in range(WORLD_SIZE)), num_changed


def _receive(pipe: Any) -> Any:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"a member has not answered for {LIMIT_S} s")
    return pipe.recv()


def _live(rank: int, pipe: Any, transport: TransportName, without_compiler: bool) -> None:
    """One member, round after round."""
    torch.set_num_threads(1)
    transport_factory._LOSS_NOTICE_WAIT_S = 0.0  # nobody is lost here, so no error has to wait for such news
    transport_factory._GAVE_UP_POLL_S = gloo._LONG_S = tcp._LONG_S = (
        TIMEOUT_S / 3
    )  # a wait of half a second is long where limits are in minutes
    if without_compiler:
        os.environ["CC"] = NO_COMPILER
    while True:
        rendezvous, kind, numel, fills = pipe.recv()
        communicator = connect(
            rendezvous, this_member(rank), world_size=WORLD_SIZE, timeout_s=LIMIT_S, transport=transport
        )
        group = communicator.group(GROUP)
        assert group is not None
        kept, operations = _operations(communicator, group, numel)
        # Not all at once: who gives up first leaves, and the others must not take it for the one that did not come.
        limit_s = TIMEOUT_S * (1 + rank / 4)
        for one in (communicator, group):
            whole: Any = one._group_transport  # type: ignore[attr-defined]
            (whole._barrier if transport == "shm" else whole)._timeout_s = limit_s
        repeated = list(operations.values()) if kind == "mixed" else [operations[kind]]
        pipe.send("connected")
        ended = _repeat(repeated)
        if fills:
            for tensor in kept:
                tensor.fill_(FILL)
        pipe.send(ended)
        pipe.recv()
        pipe.send(sum(int((tensor != FILL).sum()) for tensor in kept) if fills else 0)


def _operations(
    communicator: Communicator, group: Communicator, numel: int
) -> tuple[list[Tensor], dict[str, Callable[[], object]]]:
    """What a member keeps after an error, and what it does with it, by kind."""
    buffer = communicator.buffer(numel, torch.float32)
    tensors = [torch.ones(numel - numel // 3), torch.ones(numel // 3)]
    own = torch.ones(numel)
    operations: dict[str, Callable[[], object]] = {
        "registered": lambda: communicator.all_reduce(buffer),
        "list": lambda: communicator.all_reduce(tensors),
        "own": lambda: communicator.all_reduce(own),
        "broadcast": lambda: communicator.broadcast(buffer, 1),
        "group": lambda: group.all_reduce(own),
        "scatter": lambda: communicator.reduce_scatter(buffer, "mean"),
    }
    return [buffer, own, *tensors], operations


def _repeat(operations: Sequence[Callable[[], object]]) -> tuple[int, str]:
    """How many operations were completed before the error, and its text."""
    num_complete = 0
    while True:
        try:
            operations[num_complete % len(operations)]()
        except CommunicatorError as error:
            return num_complete, str(error)
        num_complete += 1


def main() -> int:
    """Play the rounds, print what went wrong, write the results."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=280)
    parser.add_argument("--without-compiler", action="store_true")
    parser.add_argument("--transport", choices=("shm", "tcp", "gloo"), default="shm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "suspension.json")
    asked = parser.parse_args()
    rounds = run(
        asked.rounds,
        kinds=KINDS if asked.transport == "shm" else KINDS[:-1],
        without_compiler=asked.without_compiler,
        transport=asked.transport,
        seed=asked.seed,
    )
    problems = [problem for one in rounds for problem in one.problems]
    print("\n".join(problems) or "no problem")
    print(f"{len(rounds)} rounds, {len({problem.split(':')[0] for problem in problems})} with problems")
    found = {
        **origin(),
        "without_compiler": asked.without_compiler,
        "rounds": [asdict(one) for one in rounds],
    }
    write_results(asked.output, found)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
