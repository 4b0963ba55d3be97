"""The same training on one GPU: one process, plain sharing, and MPS with 1 to 4 shares.

    python -m experiments.gpu_sharing.run --seconds 20 --repeats 3
    python -m experiments.gpu_sharing.run --tasks rayagi/Ant-v0 --shares 1 4     physics on the GPU, too

Every case trains the same number of environments, split evenly over its GMIs; cases are interleaved. Needs a GPU and
nvidia-cuda-mps-control, and says so where they are missing. Writes a JSON file after each run and a table into ``results/``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from experiments.scripts import command_line, origin, write_results
from placement.inventory import local_machine
from placement.types import Node
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.session import Session
from rayagi.envs import default_hidden

ROLLOUT_LENGTH = 32
TOTAL_ENVS = {"Ant-v5": 3072, "rayagi/Ant-v0": 8192, "rayagi/Humanoid-v0": 8192}
"""By task, over all GMIs. Physics on the host for Gymnasium's, on the GPU for the project's own."""
SHARES = (1, 2, 4)
SINGLE = "single process"
PHASES = ("simulate_s", "act_s", "update_s", "sync_s")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """One way of using one GPU."""

    backend: str
    shares: int

    @property
    def name(self) -> str:
        """As in the table."""
        return SINGLE if self.backend == "direct" and self.shares == 1 else f"{self.backend} x{self.shares}"


def cases_of(shares: list[int]) -> list[Case]:
    """Plain sharing and MPS; one MPS share alone shows what MPS itself costs."""
    return [Case(backend, count) for count in shares for backend in ("direct", "mps")]


def run_spec(task: str, case: Case) -> RunSpec:
    """With the papers' network for the task; the batch of an update is the same in every case."""
    is_own = task.startswith("rayagi/")
    return RunSpec(
        env=EnvSpec(id=task, engine="mujoco_warp") if is_own else EnvSpec(id=task),
        gmi=GmiSpec(
            backend=case.backend,
            num_gmis=case.shares,
            gmis_per_gpu=case.shares,
            num_envs=TOTAL_ENVS[task] // case.shares,
        ),
        network=NetworkSpec(hidden=default_hidden(task)),
        learning=PPOSpec(rollout_length=ROLLOUT_LENGTH, num_epochs=4, num_minibatches=4),
        seed=1,
    )


def measure(task: str, case: Case, seconds: float) -> dict[str, Any]:
    """Train for ``seconds`` after three iterations to warm up; steps/s, where the time went, and the shares."""
    began = time.perf_counter()
    with Session(run_spec(task, case)) as session:
        session.train(3)
        start_s = time.perf_counter() - began
        began, results = time.perf_counter(), []
        while time.perf_counter() - began < seconds:
            results += session.train(1)
        elapsed_s = time.perf_counter() - began
        shares = [gmi_slice.share for gmi_slice in session.plan.slices]
    total_s = sum(result.metrics["iteration_s"] for result in results)
    names = [name for name in PHASES if name in results[0].metrics]
    return {
        "task": task,
        "case": case.name,
        "steps_per_s": round(sum(result.metrics["env_steps"] for result in results) / elapsed_s, 1),
        "iterations": len(results),
        "start_s": round(start_s, 1),
        "time_split": {name: round(sum(r.metrics[name] for r in results) / total_s, 4) for name in names},
        "sms_per_share": [share.sm_count for share in shares if share is not None],
        "static_partitions": any(share is not None and share.sm_partition is not None for share in shares),
    }


def missing(node: Node) -> str | None:
    """What this machine lacks for the comparison; None where it has all."""
    if not node.gpus:
        return "there is no GPU here"
    if not node.mps_control:
        return "nvidia-cuda-mps-control is not on PATH"
    return None


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over the repeats, against the single process."""
    lines = [
        "| task | case | steps/s, median | lowest - highest | against a single process |",
        "|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(run["task"] for run in runs):
        rates: dict[str, list[float]] = {}
        for run in (run for run in runs if run["task"] == task):
            rates.setdefault(run["case"], []).append(run["steps_per_s"])
        single = rates.get(SINGLE)
        for name, found in rates.items():
            ratio = f"{median(found) / median(single):.2f}" if single else "-"
            lines.append(
                f"| {task} | {name} | {median(found):,.0f} | {min(found):,.0f} - {max(found):,.0f} | {ratio} |"
            )
    return "\n".join(lines) + "\n"


def headline(runs: list[dict[str, Any]]) -> str:
    """For docs/papers.md: each case over a single process, and MPS over plain sharing by as many GMIs."""
    parts = []
    for task, rates in rates_of(runs).items():
        alone = rates.get(SINGLE)
        single = [f"{case} {rate / alone:.2f}" for case, rate in rates.items() if alone and case != SINGLE]
        compared = [
            f"{shares} GMIs {rates[f'mps x{shares}'] / rates[f'direct x{shares}']:.2f}"
            for shares in range(2, 49)
            if {f"mps x{shares}", f"direct x{shares}"} <= rates.keys()
        ]
        found = {"over one process": single, "MPS over plain sharing": compared}
        titled = (f"{title}: {', '.join(each)}" for title, each in found.items() if each)
        parts.append(f"{task}, {'; '.join(titled)}")
    return "; ".join(parts)


def rates_of(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Task -> case -> steps/s, the median of its runs."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if "failed" not in run:
            found.setdefault(run["task"], {}).setdefault(run["case"], []).append(run["steps_per_s"])
    return {task: {case: median(rates) for case, rates in by_case.items()} for task, by_case in found.items()}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Bars for each task, over a single process."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    tasks = rates_of(runs)
    # Of all tasks, by the way of sharing and its number; a task that was not measured in a case leaves its place free.
    cases = sorted(
        {case for rates in tasks.values() for case in rates}, key=lambda case: (case != SINGLE, case)
    )
    width = 0.8 / len(tasks)
    for at, (task, rates) in enumerate(tasks.items()):
        places = [cases.index(case) + width * at for case in rates]
        axes.bar(places, [rate / rates.get(SINGLE, rate) for rate in rates.values()], width, label=task)
    axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right", fontsize=8)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_ylabel("steps/s over a single process")
    axes.legend(fontsize=8)
    figure.suptitle("Sharing one GPU", fontsize=10)
    figure.savefig(path, dpi=90)


def main() -> int:
    """Command line; returns the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TOTAL_ENVS), choices=list(TOTAL_ENVS))
    parser.add_argument("--shares", nargs="+", type=int, default=list(SHARES), help="of the GPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    (node,) = local_machine().nodes
    lack = missing(node)
    if lack is not None:
        print(f"Nothing was measured: {lack}.", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    gpu = node.gpus[0]
    stem = f"{gpu.name.replace(' ', '_').lower()}_{time.strftime('%Y-%m-%d_%H%M')}"
    head = {**origin(), "gpu": gpu.name, "driver": node.driver_version, "seconds": arguments.seconds}
    runs: list[dict[str, Any]] = []
    turns = [
        (task, case)
        for _ in range(arguments.repeats)
        for task in arguments.tasks
        for case in cases_of(arguments.shares)
    ]
    with connected():  # one Ray for all cases
        for task, case in turns:
            try:
                runs.append(measure(task, case, arguments.seconds))
            except Exception as error:  # of one case: the others are compared all the same
                runs.append({"task": task, "case": case.name, "failed": f"{type(error).__name__}: {error}"})
            print(json.dumps(runs[-1]), flush=True)
            write_results(arguments.out / f"{stem}.json", {"origin": head, "runs": runs})
    done = [run for run in runs if "failed" not in run]
    (arguments.out / f"{stem}.md").write_text(f"{gpu.name}, driver {node.driver_version}\n\n{table(done)}")
    print(table(done))
    return 0 if len(done) == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
