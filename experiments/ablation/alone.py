"""What each mechanism saves of one core's CPU time: one GMI with one thread, in this process.

    python -m experiments.ablation.alone

CPU time depends less than wall time on what else the machine does. Waiting for other GMIs or threads is not in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime

import torch

from actors.gmi import GmiContext
from experiments.ablation.run import HERE, NO_COMPILER, TASKS, Row, Setting, table
from experiments.ablation.turns import Turns
from experiments.scripts import command_line, origin, task_id, write_results
from placement.types import Slice

LAYOUT = "1x1"


def alone(task: str) -> GmiContext:
    """A single GMI on this process's first core."""
    core = min(os.sched_getaffinity(0))
    return GmiContext.local(task, gmi_slice=Slice(node="here", backend="cpu", cores=(core,)))


def measure(setting: Setting, rounds: int, iterations: int) -> Iterable[Row]:
    """All cases by turns: forwards in one round, backwards in the next. Steps per CPU second."""
    cases = [case for case in setting.cases() if case != NO_COMPILER]
    turns = Turns(alone(setting.task), setting.spec(), cases)
    for number in range(rounds):
        for case in cases if number % 2 == 0 else cases[::-1]:
            found = turns.gmi_run(case, iterations)
            where = {"task": setting.task, "layout": setting.layout, "raw": setting.raw, "off": case}
            yield {
                **where,
                "round": number,
                "iterations": iterations,
                **found,
                "steps_per_s": found["env_steps"] / found["cpu_s"],
                "other_cores": 0.0,
            }
    turns.close()


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--tasks", type=lambda text: [task_id(task) for task in text.split(",")], default=list(TASKS)
    )
    parser.add_argument("--observations", nargs="+", default=["norm", "raw"], choices=["norm", "raw"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    header, rows = origin(), list[Row]()
    path = HERE / "results" / datetime.now(UTC).strftime("alone_%Y-%m-%d_%H%M.json")
    for observations in given.observations:
        for task in given.tasks:
            rows += measure(Setting(task, LAYOUT, observations == "raw"), given.rounds, given.iterations)
            write_results(path, {"origin": header, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
