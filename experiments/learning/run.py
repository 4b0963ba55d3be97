"""Does it learn? Trains a task with several seeds through the `rayagi` command, one after another, and draws evaluations.

    python -m experiments.learning.run Ant-v5 --seeds 0 1 2 --time 15m --goal 2000

Writes results/<task>.json (evaluations of every seed, and origin) and results/<task>.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from experiments.origin import origin

HERE = Path(__file__).parent


def train(task: str, seed: int, given: argparse.Namespace) -> Path:
    """Train one seed. Returns its run folder."""
    name = f"{task}-seed{seed}"
    command = [sys.executable, "-m", "rayagi", "train", task, "--seed", str(seed), "--time", given.time]
    command += ["--evaluate-every", str(given.evaluate_every), "--out", str(given.runs), "--name", name]
    if given.stop_return is not None:
        command += ["--stop-return", str(given.stop_return)]
    subprocess.run(command, check=True)
    return Path(given.runs) / name


def read_curve(folder: Path) -> list[dict[str, float]]:
    """A run's evaluations: training seconds, environment steps, mean return and spread."""
    names = ("train_s", "env_steps_total", "evaluation_return_mean", "evaluation_return_std")
    with (folder / "evaluations.csv").open() as file:
        return [{name: float(row[name]) for name in names} for row in csv.DictReader(file)]


def seconds_to(curve: list[dict[str, float]], goal: float) -> float | None:
    """Training time, evaluations included, until the first evaluation of at least ``goal``; None: never."""
    return next((row["train_s"] for row in curve if row["evaluation_return_mean"] >= goal), None)


def draw(curves: dict[int, list[dict[str, float]]], task: str, goal: float, path: Path) -> None:
    """Mean evaluation return against wall time and against environment steps, one line a seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for seed, curve in curves.items():
        returns = [row["evaluation_return_mean"] for row in curve]
        left.plot([row["train_s"] / 60 for row in curve], returns, marker=".", label=f"seed {seed}")
        right.plot([row["env_steps_total"] / 1e6 for row in curve], returns, marker=".")
    for axes, label in ((left, "minutes, evaluations included"), (right, "million environment steps")):
        axes.axhline(goal, color="grey", linestyle="--", linewidth=1)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("mean return of 10 evaluation episodes")
    left.legend()
    figure.suptitle(f"{task}: PPO on 2 GMIs of one core each")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--time", default="15m", help="training time of one seed")
    parser.add_argument("--goal", type=float, required=True, help="evaluation return to reach")
    parser.add_argument("--stop-return", type=float, help="end a seed at this evaluation return")
    parser.add_argument("--evaluate-every", type=int, default=40, help="iterations between evaluations")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    folders = {seed: train(given.task, seed, given) for seed in given.seeds}
    curves = {seed: read_curve(folder) for seed, folder in folders.items()}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    draw(curves, given.task, given.goal, results / f"{given.task}.png")
    seeds = [
        {
            "seed": seed,
            "seconds_to_goal": seconds_to(curve, given.goal),
            "best": max(row["evaluation_return_mean"] for row in curve),
            "last": curve[-1]["evaluation_return_mean"],
            "env_steps": curve[-1]["env_steps_total"],
            "train_s": curve[-1]["train_s"],
            "curve": curve,
        }
        for seed, curve in curves.items()
    ]
    config = (folders[given.seeds[0]] / "config.yaml").read_text()
    report = {
        "origin": origin(),
        "task": given.task,
        "goal": given.goal,
        "time": given.time,
        "config": config,
        "seeds": seeds,
    }
    (results / f"{given.task}.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in seeds:
        print({name: value for name, value in row.items() if name != "curve"})


if __name__ == "__main__":
    main()
