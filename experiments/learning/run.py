"""Does it learn? Trains a task with several seeds through the `rayagi` command, one after another, and draws evaluations.

    python -m experiments.learning.run Ant-v5 --seeds 0 1 2 --time 15m --goal 2000
    python -m experiments.learning.run Ant-v5 --algorithm impala --time 5m
    python -m experiments.learning.run HalfCheetah-v5 --algorithm trpo --time 4m --goal 2500
    python -m experiments.learning.run experiments.learning.tmaze:TMaze-v0 --label TMaze_lstm --time 1m --goal 0.9 \
        --set network.core=lstm network.hidden=[32] ppo.entropy_coef=0.05

Writes results/<task>[_<algorithm>].json, or results/<label>.json (evaluations of every seed, and origin), and .png.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.scripts import command_line, origin, run_program, write_results
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.presets import preset

HERE = Path(__file__).parent


def train(task: str, seed: int, given: argparse.Namespace) -> Path:
    """Train one seed. Returns its run folder."""
    name = f"{results_name(given)}-{given.algorithm}-seed{seed}"
    command = [sys.executable, "-m", "rayagi", "train", task, "--seed", str(seed), "--time", given.time]
    command += ["--algorithm", given.algorithm]
    command += [word for setting in given.set for word in ("--set", setting)]
    every = given.evaluate_every or usual_interval(task, given.algorithm)
    command += ["--evaluate-every", str(every), "--out", str(given.runs), "--name", name]
    if given.stop_return is not None:
        command += ["--stop-return", str(given.stop_return)]
    run_program(command)
    return Path(given.runs) / name


def usual_interval(task: str, algorithm: str) -> int:
    """Iterations between evaluations: 40 of PPO's on MuJoCo's robots, and about as many steps with other presets."""
    spec = preset(task, algorithm)
    return max(1, 40 * 64 * 32 // (spec.learning.rollout_length * spec.gmi.envs))


def results_name(given: argparse.Namespace) -> str:
    """Name of the results' files."""
    return given.label or (given.task if given.algorithm == "ppo" else f"{given.task}_{given.algorithm}")


def read_curve(folder: Path) -> list[dict[str, float]]:
    """A run's evaluations: training seconds, environment steps, mean return and spread."""
    names = ("train_s", "env_steps_total", "evaluation_return_mean", "evaluation_return_std")
    with (folder / "evaluations.csv").open() as file:
        return [{name: float(row[name]) for name in names} for row in csv.DictReader(file)]


def seconds_to(curve: list[dict[str, float]], goal: float) -> float | None:
    """Training time, evaluations included, until the first evaluation of at least ``goal``; None: never."""
    return next((row["train_s"] for row in curve if row["evaluation_return_mean"] >= goal), None)


def draw(report: dict[str, Any], path: Path) -> None:
    """Mean evaluation return against training time and against environment steps, one line a seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for row in report["seeds"]:
        returns = [point["evaluation_return_mean"] for point in row["curve"]]
        minutes = [point["train_s"] / 60 for point in row["curve"]]
        millions = [point["env_steps_total"] / 1e6 for point in row["curve"]]
        left.plot(minutes, returns, marker=".", label=f"seed {row['seed']}")
        right.plot(millions, returns, marker=".")
    for axes, label in ((left, "minutes, evaluations included"), (right, "million environment steps")):
        axes.axhline(report["goal"], color="grey", linestyle="--", linewidth=1)
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("mean evaluation return")
    left.legend()
    # The plan's last line: template, backend, GMIs and environments.
    figure.suptitle(
        f"{report['label']}, {report['algorithm']}: {report['plan'].strip().splitlines()[-1].split('.')[0]}"
    )
    figure.savefig(path, dpi=110)


def summary(seed: int, folder: Path, goal: float) -> dict[str, object]:
    """One seed's curve and what it says."""
    curve = read_curve(folder)
    returns = [row["evaluation_return_mean"] for row in curve]
    return {
        "seed": seed,
        "seconds_to_goal": seconds_to(curve, goal),
        "best": max(returns, default=None),
        "last": returns[-1] if returns else None,
        "env_steps": curve[-1]["env_steps_total"] if curve else None,
        "train_s": curve[-1]["train_s"] if curve else None,
        "curve": curve,
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("task")
    parser.add_argument("--algorithm", default="ppo", choices=tuple(DEFINITIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--time", default="15m", help="training time of one seed")
    parser.add_argument("--goal", type=float, default=1500.0, help="evaluation return to reach")
    parser.add_argument("--stop-return", type=float, help="end a seed at this evaluation return")
    parser.add_argument(
        "--evaluate-every",
        type=int,
        help="iterations between evaluations; default: of about 80,000 steps of a GMI",
    )
    parser.add_argument("--set", nargs="+", default=[], help="settings, as `rayagi train --set` takes them")
    parser.add_argument(
        "--label", help="name of the results, for a task with other settings than its preset's"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result file")
    given = parser.parse_args()
    results = given.out
    results.mkdir(parents=True, exist_ok=True)
    name = results_name(given)
    report: dict[str, Any] = {
        "origin": origin(),
        "task": given.task,
        "label": name,
        "algorithm": given.algorithm,
        "goal": given.goal,
        "time": given.time,
        "seeds": [],
    }
    for seed in given.seeds:
        folder = train(given.task, seed, given)
        report["config"] = (folder / "config.yaml").read_text()
        report["plan"] = (folder / "plan.txt").read_text()
        report["seeds"].append(summary(seed, folder, given.goal))
        # After each seed, so that a later one that fails costs nothing.
        write_results(results / f"{name}.json", report)
        print({name: value for name, value in report["seeds"][-1].items() if name != "curve"}, flush=True)
        draw(report, results / f"{name}.png")


if __name__ == "__main__":
    main()
