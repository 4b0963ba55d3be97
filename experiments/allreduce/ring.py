"""Training with rayagi's choice of a reduction, against a ring such as Horovod's (GMI-DRL, figure 9c).

    python -m experiments.allreduce.ring --repeats 3 --seconds 8

Horovod reduces all gradients of a step together, by Gloo's ring where there is no NCCL, and is no longer built for current
torch. Here two GMIs train by that ring, which is what torch.distributed's Gloo does, and by turns as rayagi chooses;
everything else is the same. Writes ``results/ring.json``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from matplotlib.figure import Figure

from experiments.scripts import command_line, origin, task_id, write_results
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.session import Session
from rayagi.envs import default_hidden

RESULTS = Path(__file__).parent / "results"
TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "HumanoidStandup-v5")
GMIS, NUM_ENVS, NUM_STEPS = 2, 64, 128
Transport = Literal["auto", "gloo"]
BY: dict[str, Transport] = {"rayagi": "auto", "ring": "gloo"}


def spec_of(task: str, transport: Transport) -> RunSpec:
    """A GMI on each core, the papers' network, ten epochs of eight minibatches."""
    return RunSpec(
        env=EnvSpec(id=task),
        gmi=GmiSpec(backend="cpu", num_gmis=GMIS, num_envs=NUM_ENVS, transport=transport),
        network=NetworkSpec(hidden=default_hidden(task)),
        learning=PPOSpec(rollout_length=NUM_STEPS, num_epochs=10, num_minibatches=8),
        seed=1,
    )


def steps_per_s(task: str, transport: Transport, seconds: float) -> tuple[float, float]:
    """Environment steps a second after three iterations, and the share of time in reductions."""
    with Session(spec_of(task, transport)) as session:
        session.train(3)
        began, results = time.perf_counter(), []
        while time.perf_counter() - began < seconds:
            results += session.train(1)
        elapsed_s = time.perf_counter() - began
    steps = sum(result.metrics["env_steps"] for result in results)
    spent = sum(result.metrics["sync_s"] for result in results)
    return steps / elapsed_s, spent / sum(result.metrics["iteration_s"] for result in results)


def ratios(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """By task, rayagi's rate over the ring's in each repeat."""
    found: dict[str, list[float]] = {}
    for row in rows:
        rates = row["steps_per_s"]
        found.setdefault(row["task"], []).append(rates["rayagi"] / rates["ring"])
    return found


def headline(rows: list[dict[str, Any]]) -> str:
    """For docs/papers.md: the average of the tasks' medians, and each."""
    found = ratios(rows)
    each = ", ".join(
        f"{task} {median(values):.2f} ({min(values):.2f}-{max(values):.2f} of {len(values)})"
        for task, values in found.items()
    )
    return f"{mean(map(median, found.values())):.2f} times on average: {each}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each task."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    found = ratios(rows)
    middle = [median(values) for values in found.values()]
    below = [at - min(values) for at, values in zip(middle, found.values(), strict=True)]
    above = [max(values) - at for at, values in zip(middle, found.values(), strict=True)]
    axes.bar(range(len(found)), middle, yerr=[below, above], capsize=3, color="#4477aa")
    axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right", fontsize=8)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_ylabel("ratio of steps/s")
    figure.suptitle("Two GMIs: rayagi's reduction over a ring of Gloo", fontsize=10)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", type=task_id, default=list(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of training in each run")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for repeat in range(arguments.repeats):
        for task in arguments.tasks:
            load, rates, shares = os.getloadavg()[0], {}, {}
            for name in list(BY)[:: 1 if repeat % 2 == 0 else -1]:
                rates[name], shares[name] = steps_per_s(task, BY[name], arguments.seconds)
            row = {
                "task": task,
                "repeat": repeat,
                "steps_per_s": {name: round(rate) for name, rate in rates.items()},
                "share_of_reductions": {name: round(share, 4) for name, share in shares.items()},
                "load_before": round(load, 2),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    head = {**origin(), "gmis": GMIS, "num_envs": NUM_ENVS, "num_steps": NUM_STEPS}
    write_results(arguments.out / "ring.json", {"origin": head, "rows": rows})
    for task, found in ratios(rows).items():
        print(f"{task}: {median(found):.2f} times ({min(found):.2f} - {max(found):.2f})")


if __name__ == "__main__":
    main()
