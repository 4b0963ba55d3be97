"""How much of the cores each phase of PPO uses (GMI-DRL, figure 1b, with cores in place of a GPU).

    python -m experiments.profiler.cores --iterations 10

One GMI has all cores. Between the beginning and the end of each annotated operation the CPU time of the process, of all its
threads, is compared with the time of all cores. Physics acts and steps in one compiled call where it can, so `simulate` then
includes the policy's inference. Writes ``results/cores.json``.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from actors.gmi import GmiContext
from experiments.scripts import command_line, origin, task_id
from placement.inventory import local_machine
from placement.types import Slice
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import default_hidden, make_env_factory
from rayagi.profiler import scopes
from rayagi.profiler.layout import Category

RESULTS = Path(__file__).parent / "results"
TASKS = ("Ant-v5", "HalfCheetah-v5", "Humanoid-v5")
WARM_UP, NUM_ENVS, NUM_STEPS = 3, 256, 32
_Moment = tuple[int, int]
"""Wall and CPU time, ns."""


class UseOfCores:
    """In place of a profile: what passes from one annotation to the next counts for the innermost operation."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, _Moment, _Moment]] = []
        self._open: list[str] = []
        self._since = _now()

    def begin(self, category: Category, name: str) -> None:
        """An operation, phase or iteration opens."""
        self._cut()
        self._open.append(name if category is Category.OPERATION else "between")

    def end(self, _category: Category, _name: str) -> None:
        """It closes."""
        self._cut()
        self._open.pop()

    def begin_iteration(self) -> None:
        """Every iteration is recorded."""

    def end_iteration(self) -> None:
        """Every iteration is recorded."""

    def _cut(self) -> None:
        now = _now()
        if self._open:
            self.spans.append((self._open[-1], self._since, now))
        self._since = now


def _now() -> _Moment:
    return time.perf_counter_ns(), time.process_time_ns()


def measure(task: str, iterations: int, cores: Sequence[int]) -> dict[str, Any]:
    """Wall and CPU time of each phase, summed over the iterations, and each span of them in the order of time."""
    torch.set_num_threads(len(cores))
    spec = RunSpec(
        env=EnvSpec(id=task),
        gmi=GmiSpec(num_envs=NUM_ENVS),
        network=NetworkSpec(hidden=default_hidden(task)),
        learning=PPOSpec(rollout_length=NUM_STEPS, num_epochs=4, num_minibatches=4),
        seed=1,
    )
    context = GmiContext.local(
        task, gmi_slice=Slice(node="here", backend="cpu", cores=tuple(cores), num_threads=len(cores))
    )
    program = TrainingFactory(spec, make_env_factory(task))(context)
    for _ in range(WARM_UP):
        program.iterate()
    found = UseOfCores()
    scopes.session = scopes.annotation_recorder = found  # type: ignore[assignment]  # what of a session annotations use
    try:
        for _ in range(iterations):
            program.iterate()
    finally:
        scopes.session = scopes.annotation_recorder = None
        program.close()
    by_phase: dict[str, dict[str, int]] = defaultdict(lambda: {"ns": 0, "cpu_ns": 0})
    for name, (began, cpu_began), (ended, cpu_ended) in found.spans:
        by_phase[name]["ns"] += ended - began
        by_phase[name]["cpu_ns"] += cpu_ended - cpu_began
    first = found.spans[0][1][0]
    return {
        "task": task,
        "cores": len(cores),
        "iterations": iterations,
        "num_envs": NUM_ENVS,
        "phases": dict(by_phase),
        "spans": [
            [name, round((began[0] - first) / 1e9, 5), round((ended[0] - first) / 1e9, 5),
             round((ended[1] - began[1]) / max(1, (ended[0] - began[0]) * len(cores)), 3)]
            for name, began, ended in found.spans
            if ended[0] - began[0] > 1_000_000
        ],
    }  # fmt: skip


def utilization(phases: dict[str, dict[str, int]], cores: int) -> dict[str, float]:
    """CPU time over the time of all cores, by phase, and of all together as ``all``."""
    totals = {key: sum(each[key] for each in phases.values()) for key in ("ns", "cpu_ns")}
    return {name: each["cpu_ns"] / (each["ns"] * cores) for name, each in {**phases, "all": totals}.items()}


def headline(rows: list[dict[str, Any]]) -> str:
    """For docs/papers.md: of all iterations, and by phase."""
    parts = []
    for row in rows:
        used = utilization(row["phases"], row["cores"])
        whole = sum(each["ns"] for each in row["phases"].values())
        phases = (
            f"{name} {100 * used[name]:.0f} % for {100 * each['ns'] / whole:.0f} % of the time"
            for name, each in sorted(row["phases"].items(), key=lambda item: -item[1]["ns"])
            if each["ns"] > whole / 100
        )
        parts.append(f"{row['task']} {100 * used['all']:.0f} % ({', '.join(phases)})")
    return f"of the cores in use: {'; '.join(parts)}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Use of the cores over time, phases in colours."""
    figure = Figure(figsize=(8, 1.9 * len(rows)), layout="constrained")
    every = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    colours = {name: f"C{at}" for at, name in enumerate(sorted({n for row in rows for n in row["phases"]}))}
    for axes, row in zip(every, rows, strict=True):
        for name, start, end, used in row["spans"]:
            axes.bar(start, 100 * used, end - start, align="edge", color=colours[name])
        axes.set_title(row["task"], fontsize=9)
        axes.set_ylabel("% of cores", fontsize=8)
        axes.set_ylim(0, 110)
    shown = [Patch(color=colour, label=name) for name, colour in colours.items()]
    every[0].legend(handles=shown, fontsize=7, ncols=len(shown), loc="lower right")
    every[-1].set_xlabel("s")
    figure.savefig(path, dpi=90)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", type=task_id, default=list(TASKS))
    parser.add_argument("--iterations", type=int, default=10, help="epochs in the paper's words")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cores = local_machine().nodes[0].cores
    rows = []
    for task in arguments.tasks:
        rows.append(measure(task, arguments.iterations, cores))
        shown = {name: round(value, 2) for name, value in utilization(rows[-1]["phases"], len(cores)).items()}
        print(task, shown, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"origin": origin(), "rows": rows}) + "\n"
    (arguments.out / "cores.json").write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
