"""Which balls does a trained BallBalance keep? The share kept for a whole episode, by how fast the ball comes in.

    python -m experiments.tasks.keeping runs/tasks/BallBalance-v0-seed0

Writes results/BallBalance-v0_kept.json.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

from actors.roles import Agent
from experiments.scripts import command_line, origin, write_results
from experiments.tasks.run import HERE
from rayagi.envs import make_env_factory
from rayagi.serving.source import SavedPolicy, saved_policy

_TASK = "rayagi/BallBalance-v0"
_SEED = 54_321
"""Starts that neither training nor the evaluations saw."""
_STEPS = 500
_SPEEDS_M_S = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0)


def play(saved: SavedPolicy, num_balls: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One episode each: horizontal speeds at the start, m/s, whether balls were kept, and their last places, m, (N, 3)."""
    make_envs = make_env_factory(_TASK, kwargs=saved.spec.env.kwargs)
    env = make_envs(num_envs=num_balls, first_env_index=0, seed=_SEED, num_threads=1)
    agent, obs = Agent(saved.policy), env.reset()
    speeds, places = obs[:, 9:11].norm(dim=1), obs[:, 6:9].clone()
    kept = torch.ones(num_balls, dtype=torch.bool)
    for _ in range(_STEPS):
        got = env.step(agent.act_greedily(obs))
        obs = got.obs
        kept &= ~got.terminated
        places[got.final_ids] = got.final_obs[:, 6:9]
    env.close()
    return speeds, kept, places


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--balls", type=int, default=512)
    parser.add_argument("--which", default="best", help="checkpoint")
    given = parser.parse_args()
    saved = saved_policy(given.run, given.which)
    speeds, kept, places = play(saved, given.balls)
    by_speed = []
    for low, high in itertools.pairwise(_SPEEDS_M_S):
        within = (speeds >= low) & (speeds < high)
        counts = {"balls": int(within.sum()), "kept": int((within & kept).sum())}
        by_speed.append({"from_m_s": low, "to_m_s": high, **counts})
    report = {
        "origin": origin(),
        "checkpoint": saved.checkpoint,
        "env_steps": saved.env_steps,
        "balls": given.balls,
        "kept": int(kept.sum()),
        "by_horizontal_speed_at_the_start": by_speed,
        "kept_balls_end_from_the_axis_m": float(places[kept, :2].norm(dim=1).mean()),
        "kept_balls_end_at_height_m": float(places[kept, 2].mean()),
    }
    write_results(HERE / "results" / "BallBalance-v0_kept.json", report)
    print(json.dumps({name: value for name, value in report.items() if name != "origin"}))


if __name__ == "__main__":
    main()
