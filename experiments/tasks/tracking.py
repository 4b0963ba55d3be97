"""How well does a trained Anymal follow its commands? Errors of velocity and turn, beside what was commanded.

    python -m experiments.tasks.tracking runs/tasks/Anymal-v0-seed0

Each of the robots gets a command of its own, drawn as in training, and is given two seconds to come to speed; then its
velocity is averaged over eight. Writes results/Anymal-v0_tracking.json and .png.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from actors.roles import Agent
from experiments.scripts import command_line, origin, write_results
from experiments.tasks.run import HERE
from rayagi.envs import make_env_factory
from rayagi.serving.source import SavedPolicy, saved_policy

_TASK = "rayagi/Anymal-v0"
_SEED = 54_321
"""Starts and commands that neither training nor the evaluations saw."""
_STEP_S = 0.02
_SCALE = torch.tensor([2.0, 2.0, 0.25])
"""Of velocity and turn in the observation."""
_AXES = (("ahead, m/s", 0), ("to the left, m/s", 1), ("turn, rad/s", 2))


@dataclass(frozen=True, slots=True)
class Tracked:
    """What N robots did; those that fell count until then.

    Attributes:
        commands: velocity ahead and to the left, m/s, and turn, rad/s     (N, 3)
        motion: their means over the time measured                         (N, 3)
        errors: mean length of the velocity's error, m/s, and of the turn's, rad/s   (N, 2)
        fell: whether it fell                                               (N,)
    """

    commands: NDArray[np.float64]
    motion: NDArray[np.float64]
    errors: NDArray[np.float64]
    fell: NDArray[np.bool_]


def follow(saved: SavedPolicy, num_robots: int, settle_s: float, measure_s: float) -> Tracked:
    """Let the policy's mode follow one command each."""
    make_envs = make_env_factory(_TASK, kwargs=saved.spec.env.kwargs)
    env, agent = (
        make_envs(num_envs=num_robots, first_env_index=0, seed=_SEED, num_threads=1),
        Agent(saved.policy),
    )
    obs = env.reset()
    commands = obs[:, 9:12] / _SCALE
    standing = torch.ones(num_robots, dtype=torch.bool)
    motion, errors = torch.zeros(num_robots, 3), torch.zeros(num_robots, 2)
    counted = torch.zeros(num_robots)
    settle, steps = round(settle_s / _STEP_S), round((settle_s + measure_s) / _STEP_S)
    for step in range(steps):
        got = env.step(agent.act_greedily(obs))
        obs = got.obs
        standing[got.final_ids] = False
        if step >= settle:
            found = torch.cat((obs[:, :2], obs[:, 5:6]), 1) / _SCALE
            off = found - commands
            motion += found * standing.unsqueeze(1)
            errors += torch.stack((off[:, :2].norm(dim=1), off[:, 2].abs()), 1) * standing.unsqueeze(1)
            counted += standing
    env.close()
    share = counted.clamp_min(1).unsqueeze(1)
    fell = (~standing).numpy()
    return Tracked(
        commands.double().numpy(), (motion / share).double().numpy(), (errors / share).double().numpy(), fell
    )


def draw(tracked: Tracked, path: Path) -> None:
    """Motion against command, by axis."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    kept = ~tracked.fell
    for axes, (label, axis) in zip(figure.subplots(1, 3), _AXES, strict=True):
        commands, motion = tracked.commands[kept, axis], tracked.motion[kept, axis]
        limit = float(np.abs(tracked.commands[:, axis]).max())
        axes.plot([-limit, limit], [-limit, limit], linewidth=1, color="gray")
        axes.plot(commands, motion, ".", markersize=4)
        axes.set_xlabel(f"commanded {label}")
        axes.set_ylabel("measured")
        axes.grid(alpha=0.3)
    figure.suptitle("rayagi/Anymal-v0: mean motion of each robot against its command")
    figure.savefig(path, dpi=90)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--robots", type=int, default=256)
    parser.add_argument("--which", default="best", help="checkpoint")
    given = parser.parse_args()
    saved = saved_policy(given.run, given.which)
    tracked = follow(saved, given.robots, 2.0, 8.0)
    kept = tracked.errors[~tracked.fell]
    still = np.hypot(tracked.commands[:, 0], tracked.commands[:, 1])
    report = {
        "origin": origin(),
        "checkpoint": saved.checkpoint,
        "env_steps": saved.env_steps,
        "robots": given.robots,
        "fell_in_10_s": int(tracked.fell.sum()),
        "velocity_error_m_s": {"mean": kept[:, 0].mean(), "median": np.median(kept[:, 0])},
        "turn_error_rad_s": {"mean": kept[:, 1].mean(), "median": np.median(kept[:, 1])},
        "error_of_standing_still_m_s": still.mean(),
        "error_of_not_turning_rad_s": np.abs(tracked.commands[:, 2]).mean(),
    }
    results = HERE / "results"
    write_results(results / "Anymal-v0_tracking.json", report)
    draw(tracked, results / "Anymal-v0_tracking.png")
    print(json.dumps({name: value for name, value in report.items() if name != "origin"}))


if __name__ == "__main__":
    main()
