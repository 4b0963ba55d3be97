"""Does a task learn? Trains it with several seeds through the `rayagi` command, evaluates the policies, and shows the best.

    python -m experiments.tasks.run rayagi/Ant-v0 --seeds 0 1 2 --time 20m
    python -m experiments.tasks.run rayagi/Ant-v0 --time 20m --gmis 1 --set ppo.learning_rate=1e-3
    python -m experiments.tasks.run rayagi/Ant-v0 --from runs/tasks/Ant-v0-seed0 runs/tasks/Ant-v0-seed1 --between 3 4

What it does not know goes to `rayagi train`. ``--from`` evaluates runs that exist. Writes results/<task>.json (origin,
settings, evaluations of each seed), .csv and .png (learning curves) and _strip.png (eight frames of the best policy).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure

from actors.roles import Agent, evaluate
from experiments.learning.run import read_curve
from experiments.scripts import command_line, origin, run_program, write_results
from rayagi.envs import RenderingError, render_env
from rayagi.run.versions import usable_cores
from rayagi.serving.source import SavedPolicy, saved_policy

HERE = Path(__file__).parent
_MOST_POINTS = 400
_FRAMES = 8
_CURVE = ("train_s", "env_steps_total", "episode_return_mean", "episode_length_mean")
Curve = tuple[list[dict[str, float]], list[dict[str, float]]]
"""Training episodes and evaluations of one seed."""
_EVALUATION_SEED = 12_345
"""Starts that neither training nor its evaluations saw."""


def train(task: str, seed: int, folder: Path, given: argparse.Namespace, others: list[str]) -> None:
    """Run `rayagi train`."""
    command = [sys.executable, "-m", "rayagi", "train", task, "--seed", str(seed), "--time", given.time]
    command += ["--evaluate-every", str(given.evaluate_every)]
    command += ["--out", str(folder.parent), "--name", folder.name, *others]
    run_program(command)


def training_curve(folder: Path) -> list[dict[str, float]]:
    """Returns and lengths of training episodes, thinned to a few hundred iterations."""
    with (folder / "progress.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["episode_return_mean"]]
    every = -(-len(rows) // _MOST_POINTS) or 1
    return [{name: float(row[name]) for name in _CURVE} for row in rows[::every]]


def evaluation(saved: SavedPolicy, num_episodes: int) -> dict[str, float]:
    """Whole episodes of the policy's mode."""
    spec = saved.spec
    make_envs = spec.env.factory()
    env = make_envs(
        num_envs=num_episodes, first_env_index=0, seed=_EVALUATION_SEED, num_threads=usable_cores()
    )
    try:
        found = evaluate(env, Agent(saved.policy), num_episodes)
    finally:
        env.close()
    return {
        "episodes": num_episodes,
        "return_mean": found.mean_return(),
        "return_std": statistics.pstdev(found.episode_returns),
        "return_least": min(found.episode_returns),
        "length_mean": statistics.fmean(found.episode_lengths),
    }


def play(env: gymnasium.Env[Any, Any], agent: Agent, drawn: set[int]) -> tuple[int, float, list[Any]]:
    """One episode: its length, its return, and the frames before the steps asked for."""
    obs, _ = env.reset(seed=_EVALUATION_SEED)
    length, total, frames, done = 0, 0.0, [], False
    while not done:
        if length in drawn:
            frames.append(env.render())
        action = agent.act_greedily(torch.as_tensor(obs, dtype=torch.float32).reshape(1, -1))
        obs, reward, terminated, truncated, _ = env.step(action[0].numpy().clip(-1.0, 1.0))
        length, total, done = length + 1, total + float(reward), terminated or truncated
    return length, total, frames


def draw_strip(saved: SavedPolicy, between: tuple[float, float] | None, path: Path) -> dict[str, float]:
    """Frames of one episode, evenly over it or over ``between`` (s). Returns what the episode was like."""
    env, agent = render_env(saved.spec.env.id, saved.spec.env.kwargs), Agent(saved.policy)
    try:
        length, total, _ = play(env, agent, set())
        fps = float(env.metadata["render_fps"])
        first, last = (0.0, length / fps) if between is None else between
        steps = np.linspace(first * fps, min(last * fps, length - 1), _FRAMES).astype(int)
        _, _, frames = play(env, agent, set(steps.tolist()))
    finally:
        env.close()
    figure = Figure(figsize=(16, 6.2), layout="constrained")
    for axes, step, frame in zip(figure.subplots(2, _FRAMES // 2).flat, steps, frames, strict=False):
        axes.imshow(frame)
        axes.set_title(f"{step / fps:.2f} s", fontsize=9)
        axes.axis("off")
    figure.savefig(path, dpi=70)
    return {"length": length, "return": total, "steps_per_second": fps}


def draw_curves(task: str, curves: dict[int, Curve], path: Path) -> None:
    """Returns of training episodes (thin) and of evaluations against minutes and steps, one colour per seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, scale, label in (
        (left, "train_s", 60, "minutes of training, evaluations included"),
        (right, "env_steps_total", 1e6, "million environment steps"),
    ):
        for color, (seed, (rows, evaluated)) in enumerate(curves.items()):
            returns = [row["episode_return_mean"] for row in rows]
            axes.plot([row[name] / scale for row in rows], returns, f"C{color}", linewidth=0.6, alpha=0.5)
            means = [row["evaluation_return_mean"] for row in evaluated]
            axes.plot([row[name] / scale for row in evaluated], means, f"C{color}.-", label=f"seed {seed}")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("mean return: evaluations, training (thin)")
    left.legend()
    figure.suptitle(task)
    figure.savefig(path, dpi=90)


def write_curves(curves: dict[int, Curve], path: Path) -> None:
    """The training curves as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ("seed", *_CURVE), lineterminator="\n")
        writer.writeheader()
        for seed, (rows, _) in curves.items():
            writer.writerows({"seed": seed, **row} for row in rows)


def seed_report(saved: SavedPolicy, curve: Curve, num_episodes: int) -> dict[str, Any]:
    """What one seed learned, by its best checkpoint."""
    rows, evaluated = curve
    return {
        "seed": saved.spec.seed,
        "checkpoint": saved.checkpoint,
        "env_steps": rows[-1]["env_steps_total"] if rows else 0,
        "train_s": rows[-1]["train_s"] if rows else 0,
        "evaluation": evaluation(saved, num_episodes),
        "evaluations": evaluated,
    }


def report_on(task: str, folders: list[Path], given: argparse.Namespace) -> None:
    """Evaluate, draw and write what the seeds learned."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    name = task.rsplit("/", 1)[-1]
    policies = {folder: saved_policy(folder, "best") for folder in folders}
    curves = {
        saved.spec.seed: (training_curve(folder), read_curve(folder)) for folder, saved in policies.items()
    }
    seeds = [seed_report(saved, curves[saved.spec.seed], given.episodes) for saved in policies.values()]
    report: dict[str, Any] = {
        "origin": origin(),
        "task": task,
        "seeds": seeds,
        "config": (folders[0] / "config.yaml").read_text(),
        "plan": (folders[0] / "plan.txt").read_text(),
    }
    write_curves(curves, results / f"{name}.csv")
    draw_curves(task, curves, results / f"{name}.png")
    best = max(seeds, key=lambda row: row["evaluation"]["return_mean"])
    try:
        shown = policies[folders[seeds.index(best)]]
        strip = draw_strip(shown, given.between, results / f"{name}_strip.png")
        report["strip"] = {"seed": best["seed"], **strip}
    except RenderingError as error:
        print(error)
    write_results(results / f"{name}.json", report)
    for row in seeds:
        print(json.dumps({"task": task, "seed": row["seed"], **row["evaluation"]}), flush=True)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__, allow_abbrev=False)
    parser.add_argument("task")
    parser.add_argument("--time", default="20m", help="training time of one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--evaluate-every", type=int, default=50, help="iterations between evaluations")
    parser.add_argument("--episodes", type=int, default=32, help="of the evaluation at the end")
    parser.add_argument(
        "--between", type=float, nargs=2, metavar="S", help="seconds of the episode that the strip shows"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tasks"))
    parser.add_argument(
        "--from", type=Path, nargs="+", dest="trained", metavar="RUN", help="evaluate these run folders"
    )
    given, others = parser.parse_known_args()
    folders = given.trained
    if folders is None:
        name = given.task.rsplit("/", 1)[-1]
        folders = [given.runs / f"{name}-seed{seed}" for seed in given.seeds]
        for seed, folder in zip(given.seeds, folders, strict=True):
            train(given.task, seed, folder, given, others)
    report_on(given.task, folders, given)


if __name__ == "__main__":
    main()
