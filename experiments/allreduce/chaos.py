"""Kills members of a group at random moments, and looks at what becomes of the others.

    python -m experiments.allreduce.chaos --rounds 200
    python -m experiments.allreduce.chaos --rounds 200 --hosts 2

A round: a random member is killed (SIGKILL) before, inside or after an operation, inside operations of groups of some
members, or while the next generation meets, which another death made necessary. Then the survivors, with a replacement or
without, form the next generation and check that it reduces. A round fails if a survivor gets no error within 2 s, or one
that names nobody who was killed, if memory, a descriptor, a thread or a process is left, or if no right next generation
forms. Writes results/chaos_<transport>_<hosts>.json.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import wraps
from multiprocessing.connection import wait
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from actors.rendezvous_actor import RendezvousActor
from experiments.allreduce.chaos_member import (
    COMPUTE_S,
    Action,
    Connected,
    Noticed,
    Order,
    Settings,
    live,
)
from experiments.allreduce.membership import ElasticRendezvous
from experiments.scripts import command_line, origin, write_results

HERE = Path(__file__).parent
LIMIT_S = 2.0
"""Within which a loss must be noticed."""
ROUND_LIMIT_S = 60.0
TIMEOUT_S = 600.0
"""The members' own time limit: whoever waits for it fails the experiment."""
POINTS = ("before", "inside", "after", "group", "meeting")
ACTIONS: dict[str, Action] = {"after": "compute", "group": "group"}
"""What members do when one dies, by point; else they reduce."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "actors.rendezvous_actor", "experiments.scripts", "experiments.allreduce.chaos_member"]
)


class _Host(BaseManager):
    """Hosts the collective in a process of its own."""


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: _OneAtATime, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return call


class _OneAtATime(ElasticRendezvous):
    """Answers as Ray's actor does, one request after another, where a manager has a thread for each client."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.turn = threading.RLock()


for _name, _method in (vars(RendezvousActor) | vars(ElasticRendezvous)).items():
    if callable(_method) and not _name.startswith("_"):
        setattr(_OneAtATime, _name, _in_turn(_method))
_Host.register("RendezvousActor", _OneAtATime)


@dataclass
class Kill:
    """One death."""

    point: str
    at: float
    pid: int
    detection_s: list[float] = field(default_factory=list)
    """Of each survivor that raised: since the death, or since its operation began if that was later."""
    closing_s: list[float] = field(default_factory=list)


@dataclass
class Round:
    """What one round did and found."""

    number: int
    point: str
    replaced: bool
    kills: list[Kill]
    recovery_s: float = 0.0
    """From the last death until the whole next generation had reduced, with the start of replacements."""
    forming_s: float = 0.0
    """The part of it after the last member had come."""
    world_size: int = 0
    problems: list[str] = field(default_factory=list)


class Group:
    """The processes: started, killed, and listened to."""

    def __init__(self, rendezvous: Any, world_size: int, hosts: int, transport: Any) -> None:
        self.pipes: dict[int, Any] = {}
        self.full = world_size
        self._rendezvous, self._hosts, self._transport = rendezvous, hosts, transport
        self._processes: dict[int, Any] = {}
        self._places: dict[int, int] = {}

    def start(self) -> None:
        """Start a member on the first place that is free."""
        place = next(place for place in range(self.full) if place not in self._places.values())
        settings = Settings(place, self.full, place * self._hosts // self.full, self._transport, TIMEOUT_S)
        mine, theirs = _context.Pipe()
        process = _context.Process(target=live, args=(self._rendezvous, settings, theirs), daemon=True)
        process.start()
        theirs.close()
        self.pipes[process.pid], self._processes[process.pid] = mine, process
        self._places[process.pid] = place

    def kill(self, pid: int, point: str) -> Kill:
        """SIGKILL, and wait until the process is gone from the table."""
        found = Kill(point, time.monotonic(), pid)
        self._processes[pid].kill()
        self._forget(pid)
        return found

    def stop(self) -> None:
        """End all in order."""
        for pipe in self.pipes.values():
            pipe.send(None)
        for pid in list(self.pipes):
            self._forget(pid)

    def _forget(self, pid: int) -> None:
        self.pipes.pop(pid).close()
        del self._places[pid]
        process = self._processes.pop(pid)
        process.join(10)
        if process.is_alive() or os.path.exists(f"/proc/{pid}"):
            raise TimeoutError(f"process {pid} is still there 10 s after its end")

    def until_connected(self, order: Order | None = None) -> tuple[list[Noticed], list[Connected]]:
        """Listen until all live members are connected to each other; what was raised before, and how they are now.

        Who is connected to one that is dead by now gets the order, and so has an operation in which to notice it.

        Raises:
            TimeoutError: that did not come about within ROUND_LIMIT_S.
        """
        noticed: list[Noticed] = []
        said: list[tuple[int, Noticed | Connected]] = []
        connected: dict[int, Connected] = {}
        deadline = time.monotonic() + ROUND_LIMIT_S
        while connected.keys() != self.pipes.keys():
            ready = wait(list(self.pipes.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = self.pipes.keys() - connected.keys()
                for pid in late:
                    print(f"member {pid}, place {self._places[pid]}:", file=sys.stderr, flush=True)
                    os.kill(pid, signal.SIGUSR1)
                    time.sleep(0.5)  # its answer is written by itself
                raise TimeoutError(f"not connected after {ROUND_LIMIT_S} s: {late}; said so far: {said}")
            for pid, pipe in self.pipes.items():
                if pipe not in ready:
                    continue
                event = pipe.recv()
                said.append((pid, event))
                if isinstance(event, Noticed):
                    noticed.append(event)
                elif set(event.pids) == self.pipes.keys():
                    connected[pid] = event
                else:
                    pipe.send(order)
        return noticed, list(connected.values())


class Chaos:
    """The rounds, one after the other, of one group."""

    def __init__(self, group: Group, seed: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._group = group
        self._random = random.Random(seed)
        for _ in range(group.full):
            group.start()
        group.until_connected()

    def round(self, number: int) -> Round:
        """Kill, listen, judge."""
        group, members = self._group, list(self._group.pipes)
        point = self._random.choice(POINTS)
        num_kills = 2 if point == "meeting" else 1
        replaced = len(members) - num_kills < 2 or self._random.random() < 0.5
        order = Order(ACTIONS.get(point, "reduce"), TIMEOUT_S if replaced else 0.0)
        kills = [self._first_kill(point, members, order)]
        while replaced and len(group.pipes) < group.full:
            group.start()
        if point == "meeting":
            time.sleep(self._random.uniform(0.0, 1.0))
            kills.append(group.kill(self._random.choice(list(group.pipes)), "meeting"))
            if replaced:
                group.start()
        found = Round(number, point, replaced, kills)
        survivors = [pid for pid in members if pid in group.pipes]
        noticed, connected = group.until_connected(order)
        self._judge(found, noticed, connected, len(survivors))
        return found

    def _first_kill(self, point: str, members: list[int], order: Order) -> Kill:
        """Give the order to all, or to all but the one that will die before its operation."""
        victim = self._random.choice(members)
        for pid in members:
            if pid != victim or point != "before":
                self._group.pipes[pid].send(order)
        time.sleep(self._random.uniform(0.0, COMPUTE_S if point == "after" else 0.05))
        return self._group.kill(victim, "inside" if point == "meeting" else point)

    def _judge(
        self, found: Round, noticed: list[Noticed], connected: list[Connected], num_survivors: int
    ) -> None:
        for event in noticed:
            kills = [kill for kill in found.kills if kill.at <= event.at]
            if not kills:
                found.problems.append(f"raised before anyone was killed: {event.text}")
                continue
            kill = next((kill for kill in reversed(kills) if kill.pid in event.lost_pids), kills[-1])
            kill.detection_s.append(event.at - max(kill.at, event.began))
            kill.closing_s.append(event.closed - event.at)
            if not {kill.pid for kill in kills} & set(event.lost_pids):
                found.problems.append(f"names nobody who was killed: {event.text}")
            if kill.detection_s[-1] > self._limit_s:
                found.problems.append(f"noticed after {kill.detection_s[-1]:.2f} s: {event.text}")
            if event.left_behind:
                found.problems.append(f"left behind: {event.left_behind}")
        if sum(len(kill.detection_s) for kill in found.kills) < num_survivors:
            found.problems.append(f"of {num_survivors} survivors only {len(noticed)} raised")
        found.recovery_s = max(event.at for event in connected) - found.kills[-1].at
        found.forming_s = max(event.at for event in connected) - max(event.came for event in connected)
        found.world_size = len(connected)
        if len({(event.generation, event.pids) for event in connected}) > 1:
            found.problems.append(f"they are not in one generation: {connected}")


def table(rounds: list[Round]) -> str:
    """Detection by point of death, in milliseconds, and recovery in seconds."""
    lines = [f"{'death':10}{'deaths':>8}{'errors':>8}{'median ms':>11}{'p90 ms':>9}{'max ms':>9}"]
    for point in POINTS:
        kills = [kill for one in rounds for kill in one.kills if kill.point == point]
        times = sorted(1e3 * seconds for kill in kills for seconds in kill.detection_s)
        if times:
            p90 = times[min(len(times) - 1, int(0.9 * len(times)))]
            median = statistics.median(times)
            lines.append(f"{point:10}{len(kills):8}{len(times):8}{median:11.1f}{p90:9.1f}{times[-1]:9.1f}")
        elif kills:  # another member's death had been reported first
            lines.append(f"{point:10}{len(kills):8}{0:8}{'-':>11}{'-':>9}{'-':>9}")
    for name, seconds in (
        ("after the last death", [one.recovery_s for one in rounds]),
        ("after the last member came", [one.forming_s for one in rounds]),
    ):
        median, longest = statistics.median(seconds), max(seconds)
        lines.append(f"next generation {name}: median {median:.2f} s, max {longest:.2f} s")
    return "\n".join(lines)


def _shared_files() -> set[str]:
    """Named shared memory of this machine, without semaphores: those of other programs come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def run(
    num_rounds: int, *, world_size: int, hosts: int, transport: str, seed: int, limit_s: float = LIMIT_S
) -> list[Round]:
    """All rounds; prints each that failed. ``limit_s``: within which a loss must be noticed.

    Raises:
        TimeoutError: no next generation formed, or a process did not end.
    """
    shared = _shared_files()
    rounds = []
    with _Host(ctx=_context) as host:
        group = Group(host.RendezvousActor(world_size), world_size, hosts, transport)
        chaos = Chaos(group, seed, limit_s)
        for number in range(num_rounds):
            rounds.append(chaos.round(number))
            left = _shared_files() - shared
            if left:
                rounds[-1].problems.append(f"left in /dev/shm: {sorted(left)}")
            for problem in rounds[-1].problems:
                print(f"round {number} ({rounds[-1].point}): {problem}", flush=True)
            if (number + 1) % 10 == 0:
                failed = sum(bool(one.problems) for one in rounds)
                print(f"{number + 1} of {num_rounds} rounds, {failed} failed", flush=True)
        group.stop()
    return rounds


def main() -> int:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=1, help="how many hosts the members pretend to be on")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp", "gloo"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    header = {**origin(), "command": sys.argv[1:]}
    rounds = run(
        given.rounds,
        world_size=given.members,
        hosts=given.hosts,
        transport=given.transport,
        seed=given.seed,
    )
    print(table(rounds))
    name = f"chaos_{given.transport}_{given.hosts}"
    report = {
        "origin": header,
        "table": table(rounds).splitlines(),
        "rounds": [asdict(one) for one in rounds],
    }
    write_results(given.out / f"{name}.json", report)
    return int(any(one.problems for one in rounds))


if __name__ == "__main__":
    sys.exit(main())
