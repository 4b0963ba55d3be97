"""RL-Scope's surveys on this machine: where the time of a training loop goes, by framework, algorithm and simulator.

    python -m experiments.profiler.survey --peers PEERS            # figures 4, 5 and 7: about 15 minutes
    python -m experiments.profiler.survey --peers PEERS --figures 5
    python -m experiments.profiler.survey --draw                   # from results/survey.json

One program at a time, on one thread, recorded by ``rayagi profile``. Writes results/survey.json after each program; started
again, it measures what is missing. PEERS: the folder of experiments/peers/setup.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.profiler.stages import SKRL_STEPS, STEPS
from experiments.scripts import command_line, origin
from rayagi.profiler.overlap import NO_ITERATION, Breakdown, breakdown
from rayagi.profiler.summary import num_iterations
from rayagi.profiler.trace import read_profile

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
WALKER = "Walker2d-v5"
OFF_POLICY = ("ddpg", "sac", "td3")
STAGES = ("inference", "simulation", "backpropagation", "other")
STACK = ("simulator", "backend", "kernel", "python", "other")
"""Levels of the software stack. kernel: rayagi's compiled training code."""
COLORS = {
    "simulator": "#4477aa",
    "backend": "#66ccee",
    "kernel": "#228833",
    "python": "#ee6677",
    "other": "#bbbbbb",
}


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        figures: of the paper in which it appears
        library: rayagi, or one of experiments.profiler.stages
        algorithm: its name
        task: a Gymnasium id
        iterations: recorded
    """

    figures: tuple[int, ...]
    library: str
    algorithm: str
    task: str
    iterations: int

    @property
    def name(self) -> str:
        """As in the rows."""
        return f"{self.library} {self.algorithm} {self.task}"


CASES = (
    *(Case((4,), library, "sac", WALKER, count) for library, count in (("cleanrl", 10), ("rllib", 5))),
    Case((4,), "rllib", "ppo", WALKER, 4),
    *(Case((4,), "skrl", algorithm, WALKER, count) for algorithm, count in (("sac", 10), ("ppo", 4))),
    Case((4,), "sample-factory", "appo", WALKER, 5),
    *(
        Case((4, 5), "rayagi", algorithm, WALKER, count)
        for algorithm, count in (("sac", 30), ("td3", 30), ("ppo", 20))
    ),
    Case((4, 5), "sb3", "sac", WALKER, 10),
    Case((4, 5, 7), "sb3", "ppo", WALKER, 5),
    *(Case((5,), "sb3", algorithm, WALKER, 10) for algorithm in ("td3", "ddpg", "a2c")),
    *(
        Case((7,), "sb3", "ppo", task, 5)
        for task in ("CartPole-v1", "Hopper-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
    ),
    *(
        Case((7,), "rayagi", "ppo", task, 20)
        for task in ("CartPole-v1", "Hopper-v5", "HalfCheetah-v5", "Ant-v5", "Humanoid-v5")
    ),
)
_OWN = {"simulate": "simulation", "act": "inference", "learn": "backpropagation", "reduce": "backpropagation"}
"""rayagi's operations within a collection that goes step by step, and its others."""
OWN_ENVIRONMENT = {"sample-factory": "sf"}
"""Folders of experiments/peers/setup.sh; the other peers are in base."""
WARM_UP = 2
"""Iterations before the recorded ones, and one that is recorded and dropped."""


def command(case: Case, peers: Path, runs: Path) -> list[str]:
    """The program, from the repository's folder."""
    count = WARM_UP + 1 + case.iterations
    if case.library == "rayagi":
        options = [
            "--algorithm",
            case.algorithm,
            "--gmis",
            "1",
            "--iterations",
            str(count),
            "--out",
            str(runs),
        ]
        options += ["--set", "gmi.threads_per_gmi=1", "--evaluate-every", "100000"]
        if case.algorithm in OFF_POLICY:  # else most iterations would be before learning
            options += ["--set", f"{case.algorithm}.learning_starts=64"]
        return [sys.executable, "-m", "rayagi", "train", case.task, *options]
    python = (
        sys.executable
        if case.library == "rllib"
        else str(peers / OWN_ENVIRONMENT.get(case.library, "base") / "bin" / "python")
    )
    program = [python, "-m", "experiments.profiler.stages", case.library, case.algorithm, case.task]
    return [*program, "--iterations", str(count)]


def measure(case: Case, peers: Path) -> dict[str, Any]:
    """Record the program, and reduce its profile to a row; a program that fails is a row that says so."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        own = [sys.executable, "-m", "rayagi", "profile", "--skip", str(WARM_UP), "--out", str(profile)]
        ran = subprocess.run(
            [*own, "--iterations", str(case.iterations), "--", *command(case, peers, Path(folder) / "runs")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        row: dict[str, Any] = {
            "case": case.name,
            "library": case.library,
            "algorithm": case.algorithm,
            "task": case.task,
        }
        if ran.returncode:
            return row | {"failed": ran.stderr.strip()[-500:]}
        return row | times(breakdown(read_profile(profile)), env_steps(case, Path(folder) / "runs"))


def env_steps(case: Case, runs: Path) -> float | None:
    """Environment steps of an iteration; None where the library does not say."""
    if case.library == "rayagi":
        (progress,) = runs.glob("**/progress.csv")
        head, *rows = progress.read_text().splitlines()
        return float(rows[-1].split(",")[head.split(",").index("env_steps")])
    if case.library == "rllib":
        return None
    return float((SKRL_STEPS if case.library == "skrl" else STEPS)[case.algorithm])


def times(found: Breakdown, steps: float | None) -> dict[str, Any]:
    """Nanoseconds of each operation and set of categories within iterations, and transitions per iteration."""
    sums: Counter[tuple[str, str]] = Counter()
    for row in found.merged:
        if row.cell.iteration != NO_ITERATION:
            sums[row.cell.operation, "+".join(sorted(row.categories))] += row.ns
    count = num_iterations(found.merged)
    moves: Counter[tuple[str, str]] = Counter()
    for each, number in found.transitions.items():
        if each.cell.iteration != NO_ITERATION:
            moves[each.source, each.target] += number
    return {
        "iterations": count,
        "env_steps": steps,
        "ns": [[*key, value] for key, value in sorted(sums.items())],
        "transitions": [[*key, value / count] for key, value in sorted(moves.items())],
    }


def stage(operation: str, categories: frozenset[str]) -> str:
    """RL-Scope's stage of a row. rayagi collects whole rollouts in one call on some tasks: there the simulator's time is
    simulation but for when it acted, and all else of a collection is inference."""
    if operation == "collect":
        return "simulation" if "simulator" in categories and "kernel act" not in categories else "inference"
    return _OWN.get(operation, operation if operation in STAGES else "other")


def level(categories: frozenset[str]) -> str:
    """The level of the stack: the deepest that was active."""
    if any("kernel" in each for each in categories):
        return "kernel"
    return next((each for each in ("simulator", "backend", "python") if each in categories), "other")


def shares(row: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """(stage, level) -> share of the recorded time."""
    sums: Counter[tuple[str, str]] = Counter()
    for operation, joined, ns in row["ns"]:
        categories = frozenset(each.replace("_", " ") for each in joined.split("+"))
        sums[stage(operation, categories), level(categories)] += ns
    whole = sum(sums.values())
    return {key: value / whole for key, value in sums.items()}


def of_stage(row: Mapping[str, Any], name: str) -> float:
    """Share of a stage."""
    return sum(value for (each, _), value in shares(row).items() if each == name)


def chosen(rows: Sequence[Mapping[str, Any]], figure: int) -> list[Mapping[str, Any]]:
    """The measured rows of a figure, in the order of CASES."""
    by_name = {row["case"]: row for row in rows if "failed" not in row}
    return [by_name[case.name] for case in CASES if figure in case.figures and case.name in by_name]


def draw(rows: Sequence[Mapping[str, Any]], figure: int, path: Path) -> None:
    """Stacked bars: per program a bar for each stage, by level of the stack; shares of the program's time."""
    of_figure = chosen(rows, figure)
    picture = Figure(figsize=(2 + 1.1 * len(of_figure), 4.8), layout="constrained")
    axes = picture.subplots()
    width = 0.8 / len(STAGES)
    for place, row in enumerate(of_figure):
        found = shares(row)
        for number, name in enumerate(STAGES):
            bottom = 0.0
            for each in STACK:
                value = 100 * found.get((name, each), 0.0)
                left = place - 0.4 + (number + 0.5) * width
                axes.bar(left, value, width * 0.9, bottom=bottom, color=COLORS[each])
                bottom += value
            axes.text(left, bottom + 1, name[:3], ha="center", fontsize=6, rotation=90)
    labels = [f"{row['library']}\n{row['algorithm']}\n{row['task']}" for row in of_figure]
    axes.set_xticks(range(len(of_figure)), labels, fontsize=7)
    axes.set_ylabel("% of training time")
    axes.set_ylim(0, 110)
    handles = [axes.bar(0, 0, color=COLORS[each], label=each) for each in STACK]
    axes.legend(handles=handles, fontsize=7)
    picture.suptitle(f"RL-Scope, figure {figure}, on one thread", fontsize=10)
    picture.savefig(path, dpi=110)


def table(rows: Sequence[Mapping[str, Any]], figure: int) -> str:
    """Markdown: shares of the stages and of the stack, and transitions per 1,000 environment steps."""
    head = ["program", *STAGES, *STACK, "Python to backend per step"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in chosen(rows, figure):
        found = shares(row)
        cells = [row["case"], *(f"{100 * of_stage(row, name):.1f} %" for name in STAGES)]
        cells += (
            f"{100 * sum(value for (_, own), value in found.items() if own == each):.1f} %" for each in STACK
        )
        moves = sum(
            value for source, target, value in row["transitions"] if (source, target) == ("python", "backend")
        )
        cells.append(f"{moves / row['env_steps']:,.1f}" if row["env_steps"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=Path, default=Path("PEERS"))
    parser.add_argument("--figures", type=int, nargs="+", choices=(4, 5, 7), default=[4, 5, 7])
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw from the rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "survey.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    wanted = [case for case in CASES if set(case.figures) & set(given.figures)]
    for case in wanted if not given.draw else ():
        if any(row["case"] == case.name and "failed" not in row for row in rows):
            continue
        rows = [row for row in rows if row["case"] != case.name]
        load = os.getloadavg()[0]
        rows.append(measure(case, given.peers.absolute()) | {"load_average_before": load, "origin": origin()})
        print(case.name, rows[-1].get("failed", "measured"), flush=True)
        path.write_text(json.dumps({"rows": rows}) + "\n", encoding="utf-8")
    for figure in given.figures:
        print(f"\nFigure {figure}\n\n{table(rows, figure)}")
        draw(rows, figure, given.out / f"survey_figure_{figure}.png")


if __name__ == "__main__":
    main()
