"""How much of the raw engine's stepping rate is left to each task, with observation, reward and reset?

    python -m experiments.tasks.speed --threads 1 2

Raw is ``mujoco.batch.Batch.step`` alone, from the same states with the same controls as the task's worlds have in that step:
a first pass records them, later ones take turns, a raw step and a step of the task. Random actions, so that worlds fall
and begin anew more often than under a policy. Writes results/speed.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mujoco.batch import Batch
from torch import Tensor

from experiments.scripts import command_line, origin, write_results
from rayagi.envs.mujoco_cpu.physics import STATE_FIELDS
from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks.provider import TASKS, OwnTaskProvider, make_task
from rayagi.envs.tasks.vec_env import BatchedSim, TaskVecEnv

HERE = Path(__file__).parent
_WARM_UP = 10
"""Steps before the timed ones, so that the robots have reached the floor."""


class Recorded:
    """Worlds that keep every step's state before it and its controls."""

    def __init__(self, worlds: BatchedSim) -> None:
        self._worlds = worlds
        self.steps: list[dict[str, Any]] = []

    def step(self, controls: Tensor, num_substeps: int) -> Tensor | None:
        """Note, and pass on."""
        self.steps.append(self._worlds.state_dict() | {"ctrl": controls.numpy().copy()})
        return self._worlds.step(controls, num_substeps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worlds, name)


class Timed:
    """A task and a raw batch side by side."""

    def __init__(self, env_id: str, num_envs: int, num_threads: int, num_steps: int) -> None:
        self.env_id, self.place = env_id, VecEnvArgs(num_envs, 0, 0, num_threads)
        self.task = make_task(env_id, {})
        generator = torch.Generator().manual_seed(0)
        size = (_WARM_UP + num_steps, num_envs, self.task.action_dim)
        self.actions = 2.0 * torch.rand(size, generator=generator) - 1.0
        env = self._env()
        recorded = Recorded(env._worlds)
        env._worlds = recorded  # type: ignore[assignment]  # only here, so that tasks need no hook for it
        for actions in self.actions:
            env.step(actions)
        env.close()
        self.steps = recorded.steps
        self.raw = Batch(self.task.load(), num_envs, num_threads)
        for name in self.task.fields:
            self.raw.bind(name)  # so that it writes what the task's worlds write

    def _env(self) -> TaskVecEnv:
        env = OwnTaskProvider().make(self.env_id, "mujoco_cpu", {}, self.place)
        env.reset()
        return env

    def repeat(self) -> Mapping[str, float]:
        """Seconds of all raw steps and of all the task's steps, and how many episodes ended."""
        env = self._env()
        seconds = {"raw": 0.0, "task": 0.0, "ended": 0.0}
        state = {name: self.raw.bind(name) for name in STATE_FIELDS}
        for number, (actions, before) in enumerate(zip(self.actions, self.steps, strict=True)):
            for name, view in state.items():
                view[...] = np.asarray(before[name]).reshape(view.shape)
            begun = time.perf_counter()
            self.raw.step(nstep=self.task.frame_skip)
            between = time.perf_counter()
            step = env.step(actions)
            done = time.perf_counter()
            if number >= _WARM_UP:
                seconds["raw"] += between - begun
                seconds["task"] += done - between
                seconds["ended"] += len(step.final_ids)
        env.close()
        return seconds


def measure(env_id: str, num_envs: int, num_threads: int, num_steps: int, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    timed = Timed(env_id, num_envs, num_threads, num_steps)
    rows = [timed.repeat() for _ in range(repeats)]
    shares = [row["raw"] / row["task"] for row in rows]
    steps = num_envs * num_steps
    return {
        "task": env_id,
        "num_envs": num_envs,
        "threads": num_threads,
        "share_median": statistics.median(shares),
        "share_least": min(shares),
        "share_most": max(shares),
        "raw_env_steps_per_s": steps / statistics.median(row["raw"] for row in rows),
        "task_env_steps_per_s": steps / statistics.median(row["task"] for row in rows),
        "episodes_ended_per_step": rows[0]["ended"] / num_steps,
        "repeats": repeats,
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "speed.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"origin": origin(), "steps": given.steps, "rows": []}
    for env_id in given.tasks:
        for num_envs in given.num_envs:
            for threads in given.threads:
                row = measure(env_id, num_envs, threads, given.steps, given.repeats)
                report["rows"].append(row)
                print(
                    f"{env_id} N={num_envs} threads={threads}: {row['share_median']:.3f} of raw "
                    f"[{row['share_least']:.3f}, {row['share_most']:.3f}], "
                    f"{row['task_env_steps_per_s']:,.0f} env steps/s, "
                    f"{row['episodes_ended_per_step']:.1f} episodes end per step",
                    flush=True,
                )
                write_results(given.out, report)


if __name__ == "__main__":
    main()
