"""When do GMIs gain on the same cores? One GMI with all cores against one on each, beside the throughput model.

    python -m experiments.gains.run --repeats 3 --seconds 6

In each repeat a case is profiled, which gives the model's ratio, and both layouts are measured. Writes
``results/gains.json`` and ``.png``. README.md has the cases and the finding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from experiments.cores import process_cpu_s
from experiments.scripts import command_line, origin, write_results
from placement.inventory import local_machine
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.profiling import unit_costs_of
from rayagi.coordinator.session import Session
from rayagi.coordinator.throughput_model import layout_of, predict

RESULTS = Path(__file__).parent / "results"
LAYOUTS = ("one GMI", "a GMI on each core")


@dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
        name: for tables
        task: environment id
        num_envs: of all GMIs
        engine: of the simulation
        num_steps: of a rollout; None: the preset's
        neighbour: whether another program keeps one of the cores busy; the model does not know of it
    """

    name: str
    task: str
    num_envs: int
    engine: str = "auto"
    num_steps: int | None = None
    neighbour: bool = False


ROBOT = "experiments.gains.robot:Robot-v0"
CASES = (
    Case("compiled, 64 environments", "HalfCheetah-v5", 64),
    Case("compiled, 8 environments", "HalfCheetah-v5", 8),
    Case("simulator in Python", "HalfCheetah-v5", 64, engine="gymnasium"),
    Case("simulator that waits", ROBOT, 16, num_steps=64),
    Case("a busy neighbour", "HalfCheetah-v5", 64, neighbour=True),
)


def spec_of(case: Case, layout: str) -> RunSpec:
    """PPO's preset of the task, on a layout."""
    spec, cores = preset(case.task, "ppo"), len(os.sched_getaffinity(0))
    gmis = 1 if layout == LAYOUTS[0] else cores
    gmi = replace(
        spec.gmi, backend="cpu", num_gmis=gmis, num_envs=case.num_envs // gmis, threads_per_gmi=cores // gmis
    )
    learning = (
        spec.learning
        if case.num_steps is None
        else replace(spec.learning, rollout_length=case.num_steps, num_minibatches=4)
    )
    return checked(replace(spec, env=replace(spec.env, engine=case.engine), gmi=gmi, learning=learning))


def predicted(case: Case) -> float:
    """The model's ratio, from unit costs that are measured now."""
    costs = unit_costs_of(spec_of(case, LAYOUTS[1]), local_machine())
    rates = []
    for layout in LAYOUTS:
        with Session(spec_of(case, layout)) as session:
            rates.append(predict(costs, layout_of(session.plan)).steps_per_s)
    return rates[1] / rates[0]


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Another program computes on a core."""
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def steps_per_s(case: Case, layout: str, seconds: float) -> tuple[float, float]:
    """Environment steps a second after two iterations, and of how many cores the GMIs made use meanwhile."""
    with Session(spec_of(case, layout)) as session:
        session.train(2)
        pids = [worker.pid for worker in session.workers]
        began, used, steps = time.perf_counter(), -_cpu_s(pids), 0.0
        while time.perf_counter() - began < seconds:
            steps += sum(result.metrics["env_steps"] for result in session.train(2))
        elapsed_s = time.perf_counter() - began
        return steps / elapsed_s, (used + _cpu_s(pids)) / elapsed_s


def _cpu_s(pids: list[int]) -> float:
    return sum(process_cpu_s(pid) or 0.0 for pid in pids)


def measured(case: Case, repeat: int, seconds: float) -> dict[str, Any]:
    """One row: both layouts, in changing order."""
    rates, cores = {}, {}
    for layout in LAYOUTS[:: 1 if repeat % 2 == 0 else -1]:
        if case.neighbour:
            with busy_core(max(os.sched_getaffinity(0))):
                rates[layout], cores[layout] = steps_per_s(case, layout, seconds)
        else:
            rates[layout], cores[layout] = steps_per_s(case, layout, seconds)
    return {
        "case": case.name,
        "repeat": repeat,
        "by_model": None if case.neighbour else round(predicted(case), 3),
        "steps_per_s": {name: round(rate) for name, rate in rates.items()},
        "cores_used": {name: round(used, 3) for name, used in cores.items()},
        "load_before": round(os.getloadavg()[0], 2),
    }


def ratios(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By case, the rate of a GMI on each core over that of one GMI, in each repeat."""
    found: dict[str, list[float]] = {}
    for row in rows:
        rates = row["steps_per_s"]
        found.setdefault(row["case"], []).append(rates[LAYOUTS[1]] / rates[LAYOUTS[0]])
    return found


def by_model(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By case, what the model says in each repeat; without cases of which it does not know all."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["by_model"] is not None:
            found.setdefault(row["case"], []).append(row["by_model"])
    return found


def headline(report: dict[str, Any]) -> str:
    """For docs/papers.md: each case's median and range, beside those of the model's ratio."""
    parts, models = [], by_model(report["rows"])
    for name, values in ratios(report["rows"]).items():
        text = f"{name} {_spread(values)[:-1]} of {len(values)}"
        parts.append(text + (f"; by the model {_spread(models[name])})" if name in models else ")"))
    return ", ".join(parts)


def _spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar for each case, with its range, and the model's ratios as marks."""
    made = Figure(figsize=(6.4, 4), layout="constrained")
    axes, models = made.subplots(), by_model(report["rows"])
    for place, (name, values) in enumerate(ratios(report["rows"]).items()):
        middle = median(values)
        spread = [[middle - min(values)], [max(values) - middle]]
        axes.bar(place, middle, yerr=spread, capsize=3, color="#4477aa")
        found = models.get(name, [])
        axes.plot(
            [place] * len(found), found, "kD", markersize=4, label="by the model" if place == 0 else None
        )
    names = list(ratios(report["rows"]))
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_ylabel("a GMI on each core over one GMI")
    axes.legend()
    made.savefig(path, dpi=90)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--cases", nargs="+", help="only these, by name", choices=[case.name for case in CASES]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of training in each run (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    cases = [case for case in CASES if given.cases is None or case.name in given.cases]
    report: dict[str, Any] = {"origin": origin(), "rows": []}
    given.out.mkdir(parents=True, exist_ok=True)
    with connected():
        for repeat in range(given.repeats):
            for case in cases:
                report["rows"].append(measured(case, repeat, given.seconds))
                print(json.dumps(report["rows"][-1]), flush=True)
                write_results(given.out / "gains.json", report)
                draw(report, given.out / "gains.png")
    print(headline(report))


if __name__ == "__main__":
    main()
