"""Shards, writers and readers are killed at random moments: is anything torn, lost, or left?

    python -m experiments.replay.kills --kills 200 --seed 0

Two shards of one table, of which the writers and readers take one to be on another host. Each process runs until it is
killed; then another takes its place, a shard with the next incarnation. Checked: every row that a reader copies, and every
row that is held at the end, is one row as a writer wrote it; every row whose insertion was reported, in a shard that lived
on, is held or overwritten.
"""

from __future__ import annotations

import argparse
import os
import select as polling
import signal
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from actors.replay import (
    Column,
    Gathered,
    Keys,
    Prioritized,
    ReplayBusyError,
    ReplayError,
    ReplaySchema,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    Selection,
    Subscription,
    gather,
    select,
)
from actors.replay.kernel import COMMITTED

LENGTH, CAPACITY, ROWS = 4, 64, 3
SCHEMA = ReplaySchema(
    (Column(name="obs", dtype="float64", shape=(256,), extra=1), Column(name="number", dtype="int64")), LENGTH
)
SELECTOR = Prioritized(0.6)
WINDOWS = [Subscription(column="obs", length=LENGTH + 1), Subscription(column="number", length=LENGTH)]
HOSTS = ("here", "away")
LIMIT_S = 120.0
_REPORT = struct.Struct("qqq")
_TORN = -1


@dataclass
class Outcome:
    """What was killed, and what was found.

    Attributes:
        kills: by kind of process
        reported: rows whose insertion a writer reported
        checked: of these, in shards that lived on
        torn: rows that were no row as it was written
        missing: of the checked ones, neither held nor overwritten
        copied: rows that readers have copied
        left: names in /dev/shm
    """

    kills: dict[str, int] = field(default_factory=dict)
    reported: int = 0
    checked: int = 0
    torn: int = 0
    missing: int = 0
    copied: int = 0
    left: list[str] = field(default_factory=list)


class Process:
    """A forked process, and what it has reported so far."""

    def __init__(self, kind: str, work: Callable[[int], None]) -> None:
        self.kind, self.work = kind, work
        self.pipe, write = os.pipe()
        self.pid, self._rest = os.fork(), b""
        if self.pid == 0:
            try:
                work(write)
            finally:
                os._exit(1)
        os.close(write)

    def reports(self, timeout_s: float) -> list[tuple[int, int, int]]:
        """Whole reports that have come; waits for the first.

        Raises:
            RuntimeError: none will come: the process has ended.
        """
        if not polling.select([self.pipe], [], [], timeout_s)[0]:
            return []
        came = os.read(self.pipe, 2**20)
        if not came:
            raise RuntimeError(f"a {self.kind} has ended by itself")
        data = self._rest + came
        whole = len(data) // _REPORT.size * _REPORT.size
        self._rest = data[whole:]
        return list(_REPORT.iter_unpack(data[:whole]))

    def kill(self) -> list[tuple[int, int, int]]:
        """End it now. Returns its last reports."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        last = []
        with suppress(RuntimeError):
            while True:
                last += self.reports(0.0)
        os.close(self.pipe)
        return last


def rows_of(numbers: np.ndarray) -> dict[str, np.ndarray]:
    """Trajectories that hold their number everywhere."""
    return {
        "obs": np.repeat(numbers.astype(float), (LENGTH + 1) * 256).reshape(-1, LENGTH + 1, 256),
        "number": np.repeat(numbers, LENGTH).reshape(-1, LENGTH),
    }


def num_torn(batch: Gathered) -> int:
    """Rows of a batch that do not hold one number everywhere, with the length that belongs to it."""
    numbers, obs = batch.values["number"], batch.values["obs"]
    lengths = 1 + numbers[:, 0] % LENGTH
    steps = np.arange(LENGTH + 1)
    wanted = numbers[:, :1] * (steps < lengths[:, None] + 1)
    good = (obs == wanted[:, :, None]).all((1, 2)) & (
        numbers == numbers[:, :1] * (steps[:-1] < lengths[:, None])
    ).all(1)
    return int((~good & batch.current).sum())


def serve(folder: Path, shard: int, incarnation: int) -> Callable[[int], None]:
    """A shard that is killed some time."""

    def work(pipe: int) -> None:
        store = ReplayStore.create(
            SCHEMA, CAPACITY, selectors=(SELECTOR,), shard=shard, num_shards=2, incarnation=incarnation
        )
        served = ReplayShard(store, host_id=HOSTS[shard])
        announcement = folder / f"announced-{shard}"
        announcement.write_text(served.address)
        announcement.replace(folder / f"shard-{shard}")
        os.write(pipe, _REPORT.pack(shard, incarnation, 0))
        signal.pause()

    return work


def table_of(folder: Path, host: str = HOSTS[0]) -> ReplayShards:
    """The table as a process on this host sees it; waits for a shard."""
    while True:
        try:
            return ReplayShards(
                lambda: [path.read_text() for path in sorted(folder.glob("shard-*"))], host_id=host
            )
        except ReplayError:
            continue  # both were killed a moment ago


def write(folder: Path, first: int) -> Callable[[int], None]:
    """Insert rows into both shards in turn, and report each after its commit."""

    def work(pipe: int) -> None:
        table, number = table_of(folder), first
        while True:
            numbers = np.arange(number, number + ROWS)
            try:
                keys = table.insert(rows_of(numbers), 1 + numbers % LENGTH, 1.0, shard=number // ROWS % 2)
            except (ReplayError, ReplayBusyError):  # the shard is lost
                number += ROWS
                continue
            for one, index, generation in zip(numbers, *keys, strict=True):
                os.write(pipe, _REPORT.pack(one, index, generation))
            number += ROWS

    return work


def read(folder: Path, seed: int) -> Callable[[int], None]:
    """Select, copy and check rows, and change their priorities."""

    def work(pipe: int) -> None:
        table, draw = table_of(folder), 0
        while True:
            draw += 1
            try:
                chosen = select(table, SELECTOR, 16, seed=seed, draw=draw)
                batch = gather(table, replace(chosen, steps=0 * chosen.steps), WINDOWS)
                table.update_priorities(chosen.keys, 1.0 + np.arange(16) % 3)
            except (ReplayError, ReplayBusyError):  # nothing is held, or all shards are lost
                continue
            os.write(pipe, _REPORT.pack(_TORN, num_torn(batch), int(batch.current.sum())))

    return work


def run(kills: int, seed: int, folder: Path) -> Outcome:
    """Kill this many processes, and check what is held then."""
    rng, outcome = np.random.default_rng(seed), Outcome()
    written: dict[tuple[int, int], int] = {}
    incarnations, started = [0, 0], 0

    def start(kind: str, shard: int = 0) -> Process:
        nonlocal started
        started += 1
        if kind.startswith("shard"):
            process = Process(kind, serve(folder, shard, incarnations[shard]))
            assert process.reports(LIMIT_S), "a shard has not started"
            return process
        first = started * 1_000_002  # so that numbers are unique
        return Process(kind, write(folder, first) if kind == "writer" else read(folder, started))

    def take(reports: list[tuple[int, int, int]]) -> None:
        for number, one, other in reports:
            if number == _TORN:
                outcome.torn, outcome.copied = outcome.torn + one, outcome.copied + other
            else:
                written[one, other], outcome.reported = number, outcome.reported + 1

    running = [start("shard 0", 0), start("shard 1", 1)]
    running += [start(kind) for kind in ("writer", "writer", "reader")]
    try:
        for _ in range(kills):
            # A random number of reports of each, so that the kill comes at any moment of the work.
            for process in running[2:]:
                for _ in range(int(rng.integers(1, 8))):
                    take(process.reports(LIMIT_S))
            place = int(rng.integers(len(running)))
            kind = running[place].kind
            take(running[place].kill() if place > 1 else running[place].kill()[:0])
            outcome.kills[kind] = outcome.kills.get(kind, 0) + 1
            if place < 2:
                incarnations[place] += 1
            running[place] = start(kind, place)
        for process in running[2:]:
            take(process.kill())
        del running[2:]
        check_held(folder, written, incarnations, outcome)
    finally:
        for process in running:
            process.kill()
    outcome.left = [name for name in os.listdir("/dev/shm") if "replay" in name]
    return outcome


def check_held(
    folder: Path, written: dict[tuple[int, int], int], incarnations: list[int], outcome: Outcome
) -> None:
    """Compare what the shards hold with what was reported."""
    with table_of(folder) as table:
        table.wait(LIMIT_S)
        status = table.status()
        held = status[status["state"] == COMMITTED]
        keys = Keys(held["index"].copy(), held["generation"].copy())
        n = len(held)
        everything = Selection(keys, np.zeros(n, np.int64), np.ones(n), np.ones(n, np.float32))
        batch = gather(table, everything, WINDOWS)
        assert batch.current.all()
        outcome.torn += num_torn(batch)
        numbers = {
            (int(index), int(generation)): int(row[0])
            for index, generation, row in zip(*keys, batch.values["number"], strict=True)
        }
        for (index, generation), number in written.items():
            if generation >> 40 != incarnations[index // CAPACITY]:
                continue  # of a shard that was killed
            outcome.checked += 1
            is_overwritten = int(status["generation"][index]) > generation
            outcome.missing += not is_overwritten and numbers.get((index, generation)) != number


def main() -> None:
    """Print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(arguments.kills, arguments.seed, Path(folder))
    for name in outcome.__dataclass_fields__:
        print(f"replay_kills.{name} {getattr(outcome, name)}")


if __name__ == "__main__":
    main()
