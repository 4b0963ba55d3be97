"""What share of the perfect-overlap limit training reaches, both measured by turns of a few seconds.

Measured for half a minute each, one after the other, limit and training see different machines where the speed of one varies
within minutes. Here the limit is measured before and after each turn of training, on one core and then another, and the turn
is compared with the mean of both. Who does not have its turn sleeps.

    python -m experiments.throughput.turns
    python -m experiments.throughput.turns --layouts 2x1 --rounds 30 --seconds 4
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from experiments.cores import stolen_seconds
from experiments.scripts import bullets, command_line, origin, write_results
from experiments.throughput.limits import Alone
from experiments.throughput.run import CORES, HERE, wait_until_quiet
from experiments.throughput.settings import ROLLOUT_LENGTH, TOTAL_ENVS, run_spec
from rayagi.coordinator.session import Session

READY_WITHIN_S, ANSWER_WITHIN_S = 120.0, 60.0
WARM_UP_ITERATIONS = 8


@dataclass(frozen=True)
class Turn:
    """One turn of training, and the limit around it, in environment steps per second."""

    layout: str
    """GMIs x threads of each."""
    steps_per_s: float
    limit_before: float
    limit_after: float
    stolen_cores: float
    """What the host kept of the machine meanwhile."""

    @property
    def share(self) -> float:
        """Of the limit in the same minute."""
        return 2 * self.steps_per_s / (self.limit_before + self.limit_after)

    @property
    def share_of_what_was_left(self) -> float:
        """The limit is CPU time; what the host kept could not be used by anyone."""
        return self.share / (1 - self.stolen_cores / CORES)


class Other:
    """A process that measures for so many seconds when it is asked to."""

    def __init__(self, serve: object, *arguments: object) -> None:
        self._pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=serve, args=(theirs, *arguments))  # type: ignore[arg-type]
        self._process.start()
        theirs.close()
        self._answer(READY_WITHIN_S)

    def measure(self, seconds: float) -> float:
        """Environment steps per second."""
        self._pipe.send(seconds)
        return self._answer(seconds + ANSWER_WITHIN_S)

    def _answer(self, within_s: float) -> float:
        if not self._pipe.poll(within_s):
            raise SystemExit(f"a measuring process has not answered within {within_s:.0f} s")
        try:
            answer: float = self._pipe.recv()
        except EOFError:
            raise SystemExit("a measuring process has ended; what it printed is above") from None
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(ANSWER_WITHIN_S)


def train_when_asked(pipe: Connection, num_gmis: int, threads_per_gmi: int) -> None:
    """Runs in a process of its own until the pipe is closed."""
    with Session(run_spec(num_gmis, threads_per_gmi)) as session:
        session.train(WARM_UP_ITERATIONS)
        pipe.send(0.0)
        while (seconds := asked(pipe)) is not None:
            iterations, began = 0, time.monotonic()
            session.submit(2)  # one request ahead, as `rayagi train` asks: GMIs do not wait for the driver
            while time.monotonic() - began < seconds:
                session.submit(2)
                iterations += len(session.collect())
            iterations += len(session.collect())
            pipe.send(iterations * TOTAL_ENVS * ROLLOUT_LENGTH / (time.monotonic() - began))


def find_limit_when_asked(pipe: Connection) -> None:
    """Runs in a process of its own until the pipe is closed; on another core at each turn."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    alone = Alone(cores[0])
    pipe.send(0.0)
    while (seconds := asked(pipe)) is not None:
        cores.append(cores.pop(0))
        os.sched_setaffinity(0, {cores[0]})
        cpu_s = alone.rollout_s(seconds * 2 / 3) + alone.update_s(seconds / 3)
        pipe.send(CORES * TOTAL_ENVS * ROLLOUT_LENGTH / cpu_s)


def asked(pipe: Connection) -> float | None:
    """For how many seconds to measure; None when nobody asks any more."""
    try:
        seconds: float = pipe.recv()
    except EOFError:
        return None
    return seconds


def take_turns(layout: str, rounds: int, seconds: float) -> list[Turn]:
    """Limit, training, limit, training, ..., limit."""
    num_gmis, threads_per_gmi = (int(each) for each in layout.split("x"))
    with ExitStack() as stack:
        limit = stack.enter_context(Other(find_limit_when_asked))
        training = stack.enter_context(Other(train_when_asked, num_gmis, threads_per_gmi))
        wait_until_quiet()
        turns, before = list[Turn](), limit.measure(seconds)
        for number in range(rounds):
            stolen, began = stolen_seconds(), time.monotonic()
            steps_per_s = training.measure(seconds)
            stolen = (stolen_seconds() - stolen) / (time.monotonic() - began)
            after = limit.measure(seconds)
            turns.append(Turn(layout, steps_per_s, before, after, stolen))
            print(
                f"{layout} {number}: {steps_per_s:.0f} of {before:.0f} and {after:.0f}, {turns[-1].share:.2f}",
                flush=True,
            )
            before = after
    return turns


def summarise(turns: Sequence[Turn]) -> str:
    """A Markdown table of each layout's turns."""
    lines = [
        "| GMIs x threads | turns | steps/s | limit | share of it: mean and its standard error | median (quartiles) "
        "| the host kept, of the cores | mean share of what was left |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layout in dict.fromkeys(turn.layout for turn in turns):
        own = [turn for turn in turns if turn.layout == layout]
        shares = [turn.share for turn in own]
        error = statistics.stdev(shares) / math.sqrt(len(shares))
        low, middle, high = statistics.quantiles(shares, n=4)
        kept = statistics.fmean(turn.stolen_cores for turn in own) / CORES
        left = statistics.fmean(turn.share_of_what_was_left for turn in own)
        lines.append(
            f"| {layout} | {len(own)} | {statistics.median(turn.steps_per_s for turn in own):.0f} "
            f"| {statistics.median((turn.limit_before + turn.limit_after) / 2 for turn in own):.0f} "
            f"| {statistics.fmean(shares):.3f} +- {error:.3f} | {middle:.2f} ({low:.2f} - {high:.2f}) "
            f"| {kept:.1%} | {left:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--layouts", nargs="+", default=["2x1", "1x2"], choices=["2x1", "1x2"], help="GMIs x threads"
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each layout, at least two")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    if given.rounds < 2 or given.seconds <= 0:
        parser.error("--rounds must be at least 2, and --seconds more than 0")
    header, turns = origin(), list[Turn]()
    name = datetime.now(UTC).strftime("turns_%Y-%m-%d_%H%M")
    for layout in given.layouts:
        turns += take_turns(layout, given.rounds, given.seconds)
        rows = [asdict(turn) | {"share": turn.share} for turn in turns]
        write_results(given.out / f"{name}.json", {"origin": header, "turns": rows})
        (given.out / f"{name}.md").write_text(
            f"# Ant-v5, peers' settings: the limit by turns of {given.seconds:g} s\n\n"
            f"{bullets(header)}\n\n{summarise(turns)}\n"
        )
    print(summarise(turns))


if __name__ == "__main__":
    main()
