"""Trains Anymal in stages, each with its own range of commands: narrow ones teach it to walk, wide ones to run.

    python -m experiments.tasks.widening --out runs/tasks --name Anymal-v0-seed0

The reward of a velocity falls to a fiftieth at an error of 1 m/s: a robot that stands learns nothing from a command of
2 m/s. Between stages only the environment's options change, in the run's config.yaml; networks, optimiser and counters go
on. At the end the file has the task's own options again, for experiments.tasks.run --from and experiments.tasks.tracking.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from experiments.scripts import command_line, run_program

_TASK = "rayagi/Anymal-v0"


@dataclass(frozen=True, slots=True)
class Stage:
    """Options of the environment until a number of steps."""

    env_steps: int
    max_speed_x: float
    max_speed_y: float
    max_episode_steps: int

    def options(self) -> dict[str, float | int]:
        """As the environment takes them."""
        return {name: value for name, value in asdict(self).items() if name != "env_steps"}


STAGES = (
    Stage(1_200_000, 0.8, 0.5, 1000),
    Stage(2_200_000, 1.4, 1.0, 1000),
    Stage(4_000_000, 2.0, 1.0, 1000),
)


def set_options(folder: Path, options: dict[str, float | int]) -> None:
    """Give a run's environment other options."""
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    settings["env"]["kwargs"] = options
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))


def train(folder: Path, stage: Stage, seed: int) -> None:
    """Begin the run, or go on with it, under a stage's options."""
    limit = ["--env-steps", str(stage.env_steps)]
    command = [sys.executable, "-m", "rayagi", "train"]
    if (folder / "config.yaml").is_file():
        set_options(folder, stage.options())
        command += ["--resume", str(folder)]
    else:
        options = [f"--set=env.kwargs.{name}={value}" for name, value in stage.options().items()]
        command += [_TASK, "--gmis", "1", "--seed", str(seed), *options]
        command += ["--out", str(folder.parent), "--name", folder.name]
    run_program([*command, *limit])


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--name", default="Anymal-v0-seed0")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for stage in STAGES:
        train(given.out / given.name, stage, given.seed)
    set_options(given.out / given.name, {})


if __name__ == "__main__":
    main()
