"""How near a gradient step on a core comes to what its matrix products alone would take there.

    python -m experiments.off_policy.limits --repeats 5

    limit = floating point operations of a step's matrix products / the rate of one large product on that core

The rate is measured in turns with the steps. A step is a trainer's whole one: choice of rows, their copy out of the replay,
normalisation, and the steps of all networks. A batch of 128 is that of one of two GMIs.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from actors.gmi import GmiContext
from experiments.scripts import command_line, origin, spread, task_id, write_results
from rayagi.algorithms.factory import training_factory
from rayagi.algorithms.off_policy import OffPolicyLearner
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.config.convert import with_settings
from rayagi.config.presets import preset
from rayagi.config.rules import checked

RESULTS = Path(__file__).parent / "results" / "limits.json"
TASKS = ("HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
ALGORITHMS = ("sac", "td3", "fast_sac", "fast_td3")
SIZES = (128, 256)
STEPS, PRODUCTS, SIDE = 64, 20, 1024
"""Steps and products of a turn; rows and columns of a product."""


def learner_of(task: str, algorithm: str, size: int) -> OffPolicyLearner[Any]:
    """One that has collected what its preset begins to learn with."""
    settings = [f"{algorithm}.batch_size={size}", "gmi.num_gmis=1", "gmi.threads_per_gmi=1"]
    spec = checked(with_settings(preset(task, algorithm), settings))
    program = training_factory(spec)(GmiContext.local(task))
    assert isinstance(program, DpOnlyProgram)
    assert isinstance(program.learner, OffPolicyLearner)
    while program.learner.warms_up or not program.learner.updater.steps:
        program.iterate()
    return program.learner


def seconds_each(work: Callable[[], object], count: int) -> float:
    """Of so many calls, each."""
    started = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - started) / count


def measure(task: str, algorithm: str, size: int, repeats: int) -> dict[str, Any]:
    """Seconds of a step, and of its matrix products at the rate of a large one, by turn."""
    learner, draws = learner_of(task, algorithm, size), itertools.count()
    square = torch.randn(SIDE, SIDE)
    with FlopCounterMode(display=False) as counter:
        for _ in range(STEPS):  # the policy is not stepped with each: a mean
            learner._step(0, next(draws))
    operations = counter.get_total_flops() / STEPS
    turns = []
    for _ in range(repeats):
        rate = 2 * SIDE**3 / seconds_each(lambda: square @ square, PRODUCTS)
        turns.append({"step_s": seconds_each(lambda: learner._step(0, next(draws)), STEPS), "flops": rate})
    return {"task": task, "algorithm": algorithm, "batch": size, "operations": operations, "turns": turns}


def parts(row: dict[str, Any]) -> list[float]:
    """Of a step's time, what its matrix products would take, by turn."""
    return [row["operations"] / turn["flops"] / turn["step_s"] for turn in row["turns"]]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| task | algorithm | batch | million operations | step, ms | limit over it |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        step_ms = 1e3 * statistics.median(turn["step_s"] for turn in row["turns"])
        lines.append(
            f"| {row['task']} | {row['algorithm']} | {row['batch']} | {row['operations'] / 1e6:.0f} "
            f"| {step_ms:.2f} | {spread(parts(row))} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", type=task_id, default=TASKS, metavar="TASK")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS, choices=ALGORITHMS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    cases = itertools.product(given.tasks, given.algorithms, SIZES)
    found = {"origin": origin(), "rows": [measure(*case, given.repeats) for case in cases]}
    write_results(given.out, found)
    print(table(found["rows"]))


if __name__ == "__main__":
    main()
