"""Does a CNN learn from images? Trains PixelReach-v0 with several seeds by `rayagi train`, and StateReach-v0 for comparison.

    python -m experiments.pixels.run --seeds 0 1 2 --time 11m --state-time 20s

Writes results/reach.json (evaluations of every seed, baselines, settings, origin) and reach.png.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from actors.roles import Agent
from experiments.learning.run import summary
from experiments.pixels.env import EPISODE_STEPS, TARGET_RADIUS_M, Reach
from experiments.scripts import command_line, origin, run_program, write_results
from rayagi.envs import make_env_factory
from rayagi.envs.gymnasium_adapter import to_space
from rayagi.serving.source import saved_policy

HERE = Path(__file__).parent
MODULE, TASKS = "experiments.pixels.env", ("PixelReach-v0", "StateReach-v0")
Policy = Callable[[Reach, NDArray[Any]], NDArray[np.float32]]
"""From the environment and its observation to an action."""
NUM_EPISODES = 200
"""Episodes of each policy at the end, none of which occurs in training."""
_STEP_M = 0.15
"""Distance that the ball goes in one step at full speed along one axis."""


def straight(env: Reach, _: NDArray[Any]) -> NDArray[np.float32]:
    """The velocity that reaches the target in one step, or full speed towards it."""
    return np.clip(env.offset / _STEP_M, -1, 1).astype(np.float32)


def uniform(env: Reach, _: NDArray[Any]) -> NDArray[np.float32]:
    """A random action."""
    return env.action_space.sample()


def learned(run: Path) -> Policy:
    """Most likely action of a run's best checkpoint."""
    agent = Agent(saved_policy(run, "best").policy)

    def act(env: Reach, obs: NDArray[Any]) -> NDArray[np.float32]:
        actions = agent.act_greedily(torch.as_tensor(obs, dtype=torch.float32).reshape(1, -1))
        return to_space(env.action_space, actions.numpy())[0]

    return act


def play(act: Policy, num_episodes: int, *, pixels: bool = False) -> dict[str, float]:
    """Mean return, and share of episodes that end with the ball's centre on the target."""
    env = Reach(pixels=pixels)
    env.action_space.seed(0)
    returns, on_target = [], []
    for seed in range(num_episodes):
        obs, _ = env.reset(seed=seed)
        rewards = []
        for _ in range(EPISODE_STEPS):
            obs, reward, *_ = env.step(act(env, obs))
            rewards.append(reward)
        returns.append(sum(rewards))
        on_target.append(-rewards[-1] <= TARGET_RADIUS_M)
    return {"return": float(np.mean(returns)), "on_target": float(np.mean(on_target))}


def images_per_second(num_envs: int = 16, num_steps: int = 100) -> float:
    """Steps, each with an image, of one process that does nothing else."""
    env = make_env_factory(f"{MODULE}:{TASKS[0]}")(
        num_envs=num_envs, first_env_index=0, seed=0, num_threads=1
    )
    env.reset()
    actions = torch.zeros((num_envs, 2))
    started = time.perf_counter()
    for _ in range(num_steps):
        env.step(actions)
    return num_envs * num_steps / (time.perf_counter() - started)


def train(task: str, seed: int, limit: str, runs: Path) -> Path:
    """Train one seed, unless it has been. Returns its run folder."""
    name = f"{task}-seed{seed}"
    if (runs / name / "run.json").exists():
        return runs / name
    command = [sys.executable, "-m", "rayagi", "train", f"{MODULE}:{task}"]
    command += ["--config", str(HERE / "reach.yaml"), "--seed", str(seed), "--time", limit]
    run_program([*command, "--out", str(runs), "--name", name])
    return runs / name


def draw(report: dict[str, Any], path: Path) -> None:
    """Mean evaluation return against training time and against environment steps, one line a seed."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for task, style in zip(TASKS, ("-", ":"), strict=True):
        for row in report["tasks"].get(task, []):
            means = [point["evaluation_return_mean"] for point in row["curve"]]
            label = f"{'images' if task == TASKS[0] else 'state vectors'}, seed {row['seed']}"
            color = f"C{row['seed']}"
            minutes = [point["train_s"] / 60 for point in row["curve"]]
            thousands = [point["env_steps_total"] / 1e3 for point in row["curve"]]
            left.plot(minutes, means, style, color=color, label=label)
            right.plot(thousands, means, style, color=color)
    for axes, label in ((left, "minutes, evaluations included"), (right, "thousand environment steps")):
        for name, played in report["baselines"].items():
            mean = played["return"]
            axes.axhline(mean, color="grey", linestyle="--", linewidth=1)
            axes.annotate(name, (0.98, mean), xycoords=("axes fraction", "data"), ha="right", va="bottom")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    right.set_xlim(0, 1.05 * max(row["env_steps"] for row in report["tasks"][TASKS[0]]) / 1e3)
    left.set_ylabel("mean evaluation return")
    left.legend(loc="center right")
    figure.suptitle(f"PixelReach-v0, ppo: {report['plan'].strip().splitlines()[-1].split('.')[0]}")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--time", default="11m", help="training time of one seed on images")
    parser.add_argument("--state-time", default="20s", help="training time of one seed on state vectors")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    baselines = {
        "random actions": play(uniform, NUM_EPISODES),
        "straight to the target": play(straight, NUM_EPISODES),
    }
    goal = baselines["random actions"]["return"] / 3
    report: dict[str, Any] = {
        "origin": origin(),
        "goal": goal,
        "time": given.time,
        "state_time": given.state_time,
        "images_per_s_of_one_process": images_per_second(),
        "num_episodes": NUM_EPISODES,
        "baselines": baselines,
        "tasks": {task: [] for task in TASKS},
    }
    for task, limit in zip(TASKS, (given.time, given.state_time), strict=True):
        for seed in given.seeds:
            folder = train(task, seed, limit, given.runs)
            if task == TASKS[0]:
                report["config"] = (folder / "config.yaml").read_text()
                report["plan"] = (folder / "plan.txt").read_text()
            played = play(learned(folder), NUM_EPISODES, pixels=task == TASKS[0])
            row = {**summary(seed, folder, goal), **played}
            report["tasks"][task].append(row)
            print(task, {name: value for name, value in row.items() if name != "curve"}, flush=True)
            # After each seed, so that a later one that fails costs nothing.
            write_results(results / "reach.json", report)
            draw(report, results / "reach.png")


if __name__ == "__main__":
    main()
