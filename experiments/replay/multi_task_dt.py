"""One Decision Transformer learns three MuJoCo tasks from sharded replay, whatever the layout (GEAR, section 4.3).

    python -m experiments.replay.multi_task_dt --data data/Hopper data/HalfCheetah data/Walker2d --write

Each dataset is of `rayagi serve`. Layouts: one trainer with one shard; one with two shards; two trainers with a shard each,
as GMIs. Prints each task's loss and return at every evaluation, and the largest relative difference of the losses between
layouts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.gmi import GmiContext
from collectives.communicator import Communicator
from collectives.solo import SoloCommunicator
from experiments.replay.decision_transformer import TransformerSizes
from experiments.replay.sequence_learning import LearningSettings, SequenceTrainer
from experiments.scripts import command_line, origin, write_results
from rayagi.envs import env_info, make_env_factory
from rayagi.programs import GmiConfig, GmiManager, GmiProgram
from rayagi.serving.manifest import DatasetFolder

EVALUATION_SEED = 1_000_003
EVALUATION_EPISODES = 4

Curve = dict[str, Any]
"""losses: of each task at every step; returns: mean of each task at every evaluation; steps_per_s."""


def curve(
    paths: Sequence[str],
    settings: LearningSettings,
    communicator: Communicator,
    *,
    num_steps: int,
    evaluate_every: int,
    local_shards: int = 1,
) -> Curve:
    """Train, and evaluate with the best return of each dataset as the target."""
    tasks = [DatasetFolder.open(Path(path)).description.task for path in paths]
    datasets = [
        (path, env_info(task, engine="auto", kwargs={})) for path, task in zip(paths, tasks, strict=True)
    ]
    trainer = SequenceTrainer(datasets, settings, communicator, local_shards=local_shards)
    found: Curve = {
        "losses": [],
        "returns": [],
        "evaluated_at": [],
        "recorded": [[float(np.mean(task.statistics.returns)), task.target_return] for task in trainer.tasks],
    }
    training_s = 0.0
    for step in range(1, num_steps + 1):
        began = time.perf_counter()
        found["losses"].append(trainer.step())
        training_s += time.perf_counter() - began
        if step % evaluate_every == 0 or step == num_steps:
            found["evaluated_at"].append(step)
            found["returns"].append([mean_return(trainer, number, task) for number, task in enumerate(tasks)])
    trainer.close()
    return {**found, "training_s": training_s}


def mean_return(trainer: SequenceTrainer, number: int, task: str) -> float:
    """Of whole episodes, the same start states every time."""
    make_env = make_env_factory(task, engine="auto", kwargs={})
    env = make_env(num_envs=EVALUATION_EPISODES, first_env_index=0, seed=EVALUATION_SEED, num_threads=1)
    try:
        return float(np.mean(trainer.evaluate(number, env, trainer.tasks[number].target_return)))
    finally:
        env.close()


class CurveProgram(GmiProgram):
    """One of several trainers. All evaluate, so that none waits."""

    def __init__(
        self, context: GmiContext, paths: Sequence[str], settings: LearningSettings, **wanted: int
    ) -> None:
        super().__init__(context)
        self._arguments, self._wanted = (paths, settings, context.communicator), wanted

    def gmi_run(self) -> Curve:
        """The curve of this trainer."""
        torch.set_num_threads(1)
        return curve(*self._arguments, **self._wanted)


def curves(paths: Sequence[str], settings: LearningSettings, **wanted: int) -> dict[str, Curve]:
    """By layout."""
    found = {}
    for shards in (1, 2):
        name = f"1 trainer, {shards} shard{'s' * (shards > 1)}"
        found[name] = curve(paths, settings, SoloCommunicator(), local_shards=shards, **wanted)
        report(name, found[name])
    manager = GmiManager(GmiConfig(backend="cpu"), name="multi_task_dt")
    for gmi_id in range(2):
        manager.add_gmi(gmi_id, CurveProgram, paths, settings, **wanted)
    with manager:
        name = "2 trainers, 2 shards"
        found[name] = manager.gmi_run(timeout_s=24 * 3600.0)[0]
        report(name, found[name])
    return found


def report(name: str, found: Curve) -> None:
    """Print a layout's curve."""
    for at, returns in zip(found["evaluated_at"], found["returns"], strict=True):
        losses = np.mean(found["losses"][max(0, at - 20) : at], axis=0)
        print(f"{name}.step_{at} losses {losses.round(4).tolist()} returns {np.round(returns).tolist()}")


def largest_difference(found: dict[str, Curve], num_steps: int) -> float:
    """Of any task's loss over the first steps, relative, between the first layout and the others."""
    whole, *others = [np.array(each["losses"])[:num_steps] for each in found.values()]
    return max(float(np.abs(other / whole - 1).max()) for other in others)


def main() -> None:
    """Run all layouts."""
    parser = command_line(__doc__)
    parser.add_argument("--data", nargs="+", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--evaluate-every", type=int, default=250)
    parser.add_argument("--batch", type=int, default=16, help="sequences of each task in a gradient step")
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write OUT/<date>-multi-task-dt.json")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    settings = LearningSettings(
        sizes=TransformerSizes(units=given.units, layers=given.layers),
        batch_size=given.batch,
        seed=given.seed,
    )
    paths = [str(Path(path).absolute()) for path in given.data]
    found = curves(paths, settings, num_steps=given.steps, evaluate_every=given.evaluate_every)
    differences = {steps: largest_difference(found, steps) for steps in (1, 10, 100, given.steps)}
    for steps, difference in differences.items():
        print(f"largest_relative_difference_of_losses.first_{steps}_steps {difference:.2e}")
    if given.write:
        tasks = [DatasetFolder.open(Path(path)).description.task for path in paths]
        thinned = {
            name: {**each, "losses": [np.round(row, 6).tolist() for row in each["losses"][::10]]}
            for name, each in found.items()
        }
        result = {
            "origin": origin(), "tasks": tasks, "settings": asdict(settings), "losses_every": 10,
            "layouts": thinned, "largest_relative_difference": differences,
        }  # fmt: skip
        path = given.out / f"{datetime.now(UTC):%Y%m%d}-multi-task-dt.json"
        write_results(path, result)
        print(path)


if __name__ == "__main__":
    main()
