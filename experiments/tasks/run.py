"""Does a task learn? Trains it through the `rayagi` command, evaluates what it learned, and shows it.

    python -m experiments.tasks.run rayagi/Ant-v0 --time 20m
    python -m experiments.tasks.run rayagi/Ant-v0 --time 20m --gmis 1 --set ppo.learning_rate=1e-3
    python -m experiments.tasks.run rayagi/Ant-v0 --from runs/tasks/Ant-v0-seed0 --between 3 4

What it does not know goes to `rayagi train`. ``--from`` looks at a run that is there already. Writes results/<task>.json
(origin, settings, evaluation), .csv and .png (learning curve) and _strip.png (one episode of the best policy, eight frames).
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from matplotlib.figure import Figure

from actors.agent import Agent
from actors.collecting import evaluate
from experiments.learning.run import read_curve
from experiments.origin import origin
from rayagi.envs import RenderingError, make_env_factory, render_env
from rayagi.run.versions import usable_cores
from rayagi.serving.source import SavedPolicy, saved_policy

HERE = Path(__file__).parent
_MOST_POINTS = 400
_FRAMES = 8
_CURVE = ("train_s", "env_steps_total", "episode_return_mean", "episode_length_mean")
_EVALUATION_SEED = 12_345
"""Starts that neither training nor its evaluations saw."""


def train(task: str, folder: Path, given: argparse.Namespace, others: list[str]) -> None:
    """Run `rayagi train`."""
    command = [sys.executable, "-m", "rayagi", "train", task, "--seed", str(given.seed), "--time", given.time]
    command += ["--evaluate-every", str(given.evaluate_every)]
    command += ["--out", str(folder.parent), "--name", folder.name, *others]
    subprocess.run(command, check=True)


def training_curve(folder: Path) -> list[dict[str, float]]:
    """Returns and lengths of training episodes, thinned to a few hundred iterations."""
    with (folder / "progress.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["episode_return_mean"]]
    every = -(-len(rows) // _MOST_POINTS) or 1
    return [{name: float(row[name]) for name in _CURVE} for row in rows[::every]]


def evaluation(saved: SavedPolicy, num_episodes: int) -> dict[str, float]:
    """Whole episodes of the policy's mode."""
    spec = saved.spec
    make_envs = make_env_factory(spec.env.id, engine=spec.env.engine, kwargs=spec.env.kwargs)
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


def draw_curve(
    task: str, rows: list[dict[str, float]], evaluated: list[dict[str, float]], path: Path
) -> None:
    """Returns of training episodes and of evaluations against minutes and steps."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, scale, label in (
        (left, "train_s", 60, "minutes of training, evaluations included"),
        (right, "env_steps_total", 1e6, "million environment steps"),
    ):
        returns = [row["episode_return_mean"] for row in rows]
        axes.plot([row[name] / scale for row in rows], returns, linewidth=1, label="training episodes")
        means = [row["evaluation_return_mean"] for row in evaluated]
        axes.plot([row[name] / scale for row in evaluated], means, marker=".", label="evaluation")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    left.set_ylabel("mean return")
    left.legend()
    figure.suptitle(task)
    figure.savefig(path, dpi=90)


def write_curve(rows: list[dict[str, float]], path: Path) -> None:
    """The curve as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _CURVE, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def look(task: str, folder: Path, given: argparse.Namespace) -> None:
    """Evaluate, draw and write what a run learned."""
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    name = task.rsplit("/", 1)[-1]
    rows, evaluated = training_curve(folder), read_curve(folder)
    saved = saved_policy(folder, "best")
    report: dict[str, Any] = {
        "origin": origin(),
        "task": task,
        "checkpoint": saved.checkpoint,
        "env_steps": rows[-1]["env_steps_total"] if rows else 0,
        "train_s": rows[-1]["train_s"] if rows else 0,
        "evaluation": evaluation(saved, given.episodes),
        "evaluations": evaluated,
        "config": (folder / "config.yaml").read_text(),
        "plan": (folder / "plan.txt").read_text(),
    }
    write_curve(rows, results / f"{name}.csv")
    draw_curve(task, rows, evaluated, results / f"{name}.png")
    try:
        report["strip"] = draw_strip(saved, given.between, results / f"{name}_strip.png")
    except RenderingError as error:
        print(error)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"task": task, **report["evaluation"]}), flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("task")
    parser.add_argument("--time", default="20m", help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=50, help="iterations between evaluations")
    parser.add_argument("--episodes", type=int, default=32, help="of the evaluation at the end")
    parser.add_argument(
        "--between", type=float, nargs=2, metavar="S", help="seconds of the episode that the strip shows"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--from", type=Path, dest="trained", metavar="RUN", help="look at this run folder")
    given, others = parser.parse_known_args()
    folder = given.trained or given.runs / f"{given.task.rsplit('/', 1)[-1]}-seed{given.seed}"
    if given.trained is None:
        train(given.task, folder, given, others)
    look(given.task, folder, given)


if __name__ == "__main__":
    main()
