"""What do the arm and the hand achieve, in metres and goals instead of rewards?

    python -m experiments.tasks.manipulation runs/tasks/FrankaCabinet-v0-seed0 runs/tasks/FrankaCabinet-v0-seed1
    python -m experiments.tasks.manipulation runs/tasks/ShadowHand-v0-seed0

One whole episode of each world, with the policy's mode, and the same episodes with the action 0 throughout: the arm rests,
the hand stays half closed. ShadowHand plays with each of three tolerances of the goal. Writes results/<task>_episodes.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.roles import Agent
from experiments.scripts import command_line, origin, write_results
from experiments.tasks.run import HERE
from rayagi.envs import make_env_factory
from rayagi.run.versions import usable_cores
from rayagi.serving.source import SavedPolicy, saved_policy

_SEED = 54_321
"""Starts and goals that neither training nor the evaluations saw."""
_STEP_S = 1 / 60
_OPENING = 21
"""Where FrankaCabinet's observation has the drawer's opening, m."""
_TURN_LEFT = 92
"""Where ShadowHand's observation has the real part of the turn between cube and goal."""
_TOLERANCES_RAD = (0.4, 0.2, 0.1)
_GOAL_BONUS = 200.0
"""Only a reached goal pays more in one step: 250 of at most 10 besides."""


def episodes(
    saved: SavedPolicy, num_worlds: int, act: Callable[[Tensor], Tensor], options: dict[str, float]
) -> list[NDArray[Any]]:
    """The first episode of each world: its observations after each step, with the reward in front, (steps, 1 + obs_dim)."""
    kwargs = {**saved.spec.env.kwargs, **options}
    make_envs = make_env_factory(saved.spec.env.id, kwargs=kwargs)
    env = make_envs(num_envs=num_worlds, first_env_index=0, seed=_SEED, num_threads=usable_cores())
    obs, rows = env.reset(), []
    length = torch.zeros(num_worlds, dtype=torch.int64)
    while (length == 0).any():
        step = env.step(act(obs))
        obs, seen = step.obs, step.obs.clone()
        seen[step.final_ids] = step.final_obs
        rows.append(torch.cat((step.rewards.unsqueeze(1), seen), 1).numpy())
        first = step.final_ids[length[step.final_ids] == 0]
        length[first] = len(rows)
    env.close()
    course = np.stack(rows, 1)
    return [course[world, : int(length[world])] for world in range(num_worlds)]


def drawer(courses: list[NDArray[Any]]) -> dict[str, float | None]:
    """How far the drawers came out."""
    openings = [course[:, 1 + _OPENING] for course in courses]
    widest = np.array([opening.max() for opening in openings])
    first = [int(np.argmax(opening > 0.2)) for opening in openings if opening.max() > 0.2]
    return {
        "return_mean": float(np.mean([course[:, 0].sum() for course in courses])),
        "widest_opening_m_median": float(np.median(widest)),
        "widest_opening_m_least": float(widest.min()),
        "opening_at_the_end_m_median": float(np.median([opening[-1] for opening in openings])),
        "share_opened_0.01_m": float((widest > 0.01).mean()),
        "share_opened_0.2_m": float((widest > 0.2).mean()),
        "share_opened_0.35_m": float((widest > 0.35).mean()),
        "share_ended_open_0.39_m": float((widest > 0.39).mean()),
        "seconds_to_0.2_m_median": float(np.median(first) * _STEP_S) if first else None,
    }


def cube(courses: list[NDArray[Any]], limit: int) -> dict[str, float | None]:
    """How long the cubes were kept, and how many goals they reached."""
    lengths = np.array([len(course) for course in courses])
    goals = np.array([(course[:, 0] > _GOAL_BONUS).sum() for course in courses])
    turns = [2 * np.arccos(np.clip(np.abs(course[:, 1 + _TURN_LEFT]), 0, 1)) for course in courses]
    return {
        "return_mean": float(np.mean([course[:, 0].sum() for course in courses])),
        "seconds_kept_mean": float(lengths.mean() * _STEP_S),
        "share_kept_to_the_end": float((lengths == limit).mean()),
        "goals_per_episode_mean": float(goals.mean()),
        "goals_per_episode_most": int(goals.max()),
        "share_with_a_goal": float((goals > 0).mean()),
        "seconds_per_goal": float(lengths.sum() * _STEP_S / goals.sum()) if goals.sum() else None,
        "angle_to_the_goal_rad_mean": float(np.mean(np.concatenate(turns))),
        "least_angle_of_an_episode_rad_median": float(np.median([turn.min() for turn in turns])),
    }


def achieved(saved: SavedPolicy, num_worlds: int, act: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """What the task is about; for ShadowHand by the goal's tolerance, rad."""
    if "FrankaCabinet" in saved.spec.env.id:
        return drawer(episodes(saved, num_worlds, act, {}))
    limit = saved.info.max_episode_steps
    assert limit is not None
    return {
        str(tolerance): cube(
            episodes(saved, num_worlds, act, {"first_tolerance": tolerance, "last_tolerance": tolerance}),
            limit,
        )
        for tolerance in _TOLERANCES_RAD
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, one per seed")
    parser.add_argument("--worlds", type=int, default=256)
    parser.add_argument("--which", default="best", help="checkpoint")
    given = parser.parse_args()
    policies = [saved_policy(run, given.which) for run in given.runs]
    task, dim = policies[0].spec.env.id, policies[0].info.action.dim
    report: dict[str, Any] = {"origin": origin(), "worlds": given.worlds, "seeds": []}
    for saved in policies:
        found = achieved(saved, given.worlds, Agent(saved.policy).act_greedily)
        row = {
            "seed": saved.spec.seed,
            "checkpoint": saved.checkpoint,
            "env_steps": saved.env_steps,
            "policy": found,
        }
        report["seeds"].append(row)
        print(json.dumps(row), flush=True)
    report["action 0"] = achieved(policies[0], given.worlds, lambda _: torch.zeros((given.worlds, dim)))
    print(json.dumps({"action 0": report["action 0"]}), flush=True)
    write_results(HERE / "results" / f"{task.rsplit('/', 1)[-1]}_episodes.json", report)


if __name__ == "__main__":
    main()
