"""What it gains and costs that a GMI's idle threads spin for a moment before they sleep: one GMI with two threads.

    python -m experiments.ablation.waiting

Threads sleep at once (0 spins), spin as rayagi's do (2000), or as torch's do by default (300000, some 3 ms); on the machine
as it is, and beside a process that never waits. All cases by turns, each run in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from actors.protocols import IterationResult
from experiments.cores import not_idle_seconds
from experiments.scripts import command_line, origin, spread, write_results
from experiments.throughput.ours import gmis_cpu_s
from placement.backends import base
from rayagi.config.presets import preset
from rayagi.config.spec import RunSpec
from rayagi.coordinator.session import Session

RESULTS = Path(__file__).parent / "results" / "waiting"
CASES = (
    ("HalfCheetah-v5", "ppo", "none"),
    ("HalfCheetah-v5", "ppo", "lstm"),
    ("HalfCheetah-v5", "trpo", "none"),
    ("HalfCheetah-v5", "sac", "none"),
    ("Hopper-v5", "td3", "none"),
    ("CartPole-v1", "dqn", "none"),
)
"""Task, algorithm, recurrent core. PPO without a core is learned by a compiled program, the others by torch."""
SPINS = (0, base.SPINS, 300_000)
OFF_POLICY = ("sac", "td3", "dqn")
UNCOUNTED_S = 3.0
"""At the beginning of a run: caches and memory are cold."""
BESIDE = ("nothing", "a busy process")
BUSY = (sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass")
"""Ends with this process, also if that is killed."""
Row = dict[str, Any]


def spec_of(task: str, algorithm: str, core: str) -> RunSpec:
    """The preset in one GMI with two threads; off-policy algorithms learn from the first steps on."""
    found = preset(task, algorithm)
    if algorithm in OFF_POLICY:
        found = replace(found, learning=replace(found.learning, learning_starts=256))
    gmi = replace(found.gmi, backend="cpu", num_gmis=1, threads_per_gmi=2)
    return replace(found, gmi=gmi, network=replace(found.network, core=core))


def separately(work: Callable[..., Row], *arguments: Any) -> Row:
    """Call it in a process of its own, which has made no plan before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def parsed(doc: str | None) -> argparse.Namespace:
    """The command line of an experiment whose docstring this is."""
    parser = command_line(doc)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def run(case: tuple[str, str, str], spins: int, seconds: float) -> Row:
    """Train with so many spins; they are those of plans that this process makes."""
    base.SPINS = spins
    return rate_of(spec_of(*case), seconds)


def rate_of(spec: RunSpec, seconds: float) -> Row:
    """Environment steps per second of training, and the cores that other processes used meanwhile."""
    with Session(spec) as session:
        steps_within(session, UNCOUNTED_S)
        pids = [worker.pid for worker in session.workers]
        used, own, began = not_idle_seconds(), gmis_cpu_s(pids), time.monotonic()
        steps = steps_within(session, seconds)
        wall_s = time.monotonic() - began
        others = not_idle_seconds() - used - (gmis_cpu_s(pids) - own)
    return {"steps_per_s": round(steps / wall_s, 1), "other_cores": round(max(0.0, others) / wall_s, 2)}


def steps_within(session: Session, seconds: float) -> float:
    """Environment steps of iterations for so long. One request is ahead, so that the GMI does not wait for this process."""
    until, steps = time.monotonic() + seconds, 0.0
    session.submit(2)
    while time.monotonic() < until:
        session.submit(2)
        steps += _steps(session.collect())
    return steps + _steps(session.collect())


def _steps(results: Sequence[IterationResult]) -> float:
    return sum(result.metrics["env_steps"] for result in results)


def table(rows: Sequence[Row]) -> str:
    """Markdown: steps/s, and over those of the same repeat whose threads slept at once; medians (lowest - highest)."""
    lines = ["| case | beside | spins | steps/s | over sleeping at once |", "|---|---|---|---|---|"]
    for case, beside in dict.fromkeys((row["case"], row["beside"]) for row in rows):
        rates: dict[int, dict[int, float]] = {}
        for row in rows:
            if (row["case"], row["beside"]) == (case, beside):
                rates.setdefault(row["spins"], {})[row["repeat"]] = row["steps_per_s"]
        for spins, found in rates.items():
            asleep = rates.get(0, {})
            ratios = [rate / asleep[repeat] for repeat, rate in found.items() if repeat in asleep]
            cells = (spread([*found.values()], ",.0f"), spread(ratios))
            lines.append(f"| {case} | {beside} | {spins} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    given = parsed(__doc__)
    header, rows = origin(), list[Row]()
    path = RESULTS / datetime.now(UTC).strftime("%Y-%m-%d_%H%M.json")
    for repeat, beside, case, spins in itertools.product(range(given.repeats), BESIDE, CASES, SPINS):
        busy = subprocess.Popen(BUSY) if beside == "a busy process" else None
        try:
            found = separately(run, case, spins, given.seconds)
        finally:
            if busy is not None:
                busy.kill()
                busy.wait()
        row = {"case": named(*case), "beside": beside, "spins": spins, "repeat": repeat, **found}
        print(row, flush=True)
        rows.append(row)
        write_results(path, {"origin": header, "seconds": given.seconds, "rows": rows})
    print(table(rows))


def named(task: str, algorithm: str, core: str) -> str:
    """``TRPO, HalfCheetah-v5``."""
    return f"{algorithm.upper()}{'' if core == 'none' else ', ' + core}, {task}"


if __name__ == "__main__":
    main()
