"""A Multi-Agent Transformer learns HalfCheetah's two legs on line, from sharded replay (GEAR, section 4.3 and figure 8).

    python -m experiments.replay.mat_half_cheetah --updates 5 --layouts 1x1 1x2 2x2 nudged    # do the layouts learn alike?
    python -m experiments.replay.mat_half_cheetah --updates 160 --seeds 0 1                   # does it learn? 330,000 steps
    python -m experiments.replay.mat_half_cheetah --updates 80 --layouts 1x1 2x2 --out mat.json

Each leg is an agent with three joints. Both get the robot's reward. A layout is trainers x shards: 1x1 is the unsharded run;
the trainers of 2x2 are GMIs with a shard each. "nudged" is 1x1 from initial weights that differ in their last bits: how fast
training itself amplifies rounding. Prints the mean return of greedy episodes and of the episodes that end during training
(with exploration), and how far the losses differ from the first layout's, over the first 1, 40, 80, ... gradient steps (40
are an update). --out writes all that to a JSON file, and a plot beside it, in which grey lines are PPO's: recorded by
experiments.learning.run, one agent with both legs, greedy episodes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from actors.gmi import GmiContext
from actors.roles import evaluate
from collectives.communicator import Communicator
from collectives.objects import all_gather_objects
from collectives.solo import SoloCommunicator
from experiments.replay.multi_agent_learning import HALF_CHEETAH, METRICS, TeamSettings, TeamTrainer
from experiments.scripts import command_line, origin
from rayagi.envs import make_env_factory
from rayagi.programs import GmiConfig, GmiManager, GmiProgram

TASK = "HalfCheetah-v5"
PPO = Path(__file__).parents[1] / "learning" / "results" / "HalfCheetah-v5.json"
EVALUATION_SEED = 1_000_003
EVALUATION_EPISODES = 4
LAYOUTS = {"1x1": (1, 1), "1x2": (1, 2), "2x2": (2, 2), "nudged": (1, 1)}
"""Trainers, and shards of all of them."""
COMPARED_STEPS = (1, 40, 80, 120, 160, 200, 400)

Curve = dict[str, Any]
"""losses: METRICS of every gradient step; training: [environment steps, mean return] where episodes ended; greedy: the same
of evaluations; training_s, cpu_s: of this trainer, without evaluations."""


def curve(
    settings: TeamSettings,
    communicator: Communicator,
    *,
    updates: int,
    evaluate_every: int,
    local_shards: int = 1,
    nudged: bool = False,
) -> Curve:
    """Train, and evaluate. Collective. ``nudged``: begin with every weight changed in its last bit."""
    make_env = make_env_factory(TASK)
    trainer = TeamTrainer(make_env, HALF_CHEETAH, settings, communicator, local_shards=local_shards)
    if nudged:
        weights = trainer.optimiser.flat.parameters.data
        weights.copy_(weights.nextafter(torch.ones(1)))
    found: Curve = {"losses": [], "training": [], "greedy": [], "training_s": 0.0, "cpu_s": 0.0}
    for number in range(1, updates + 1):
        began, began_cpu = time.perf_counter(), time.process_time()
        found["losses"] += trainer.update()
        everywhere = all_gather_objects(trainer.simulator.take_finished()[0], communicator)
        ended = [each for own in everywhere for each in own]
        found["training_s"] += time.perf_counter() - began
        found["cpu_s"] += time.process_time() - began_cpu
        if ended:
            found["training"].append([trainer.env_steps, float(np.mean(ended))])
        if number % evaluate_every == 0 or number == updates:
            env = make_env(
                num_envs=EVALUATION_EPISODES, first_env_index=0, seed=EVALUATION_SEED, num_threads=1
            )
            returns = evaluate(env, trainer, EVALUATION_EPISODES).episode_returns
            env.close()
            found["greedy"].append([trainer.env_steps, float(np.mean(returns))])
            print(f"{trainer.env_steps} steps: greedy {returns} {found['cpu_s']:.0f} CPU s", flush=True)
    trainer.close()
    return found


class CurveProgram(GmiProgram):
    """One of several trainers. All evaluate, so that none waits."""

    def __init__(self, context: GmiContext, settings: TeamSettings, **wanted: int) -> None:
        super().__init__(context)
        self._settings, self._wanted = settings, wanted

    def gmi_run(self) -> Curve:
        """The curve of this trainer."""
        torch.set_num_threads(1)
        return curve(self._settings, self.context.communicator, **self._wanted)


def curve_of(layout: str, settings: TeamSettings, **wanted: int) -> Curve:
    """The curve of a layout."""
    trainers, shards = LAYOUTS[layout]
    if trainers == 1:
        return curve(settings, SoloCommunicator(), local_shards=shards, nudged=layout == "nudged", **wanted)
    manager = GmiManager(GmiConfig(backend="cpu"), name="mat_half_cheetah")
    for gmi_id in range(trainers):
        manager.add_gmi(gmi_id, CurveProgram, settings, **wanted)
    with manager:
        found: Curve = manager.gmi_run(timeout_s=24 * 3600.0)[0]
    return found


def ppo_curves(path: Path, most_steps: int) -> list[list[list[float]]]:
    """[environment steps, mean greedy return] of each recorded seed, up to so many steps."""
    rows = [seed["curve"] for seed in json.loads(path.read_text())["seeds"]]
    curves = [[[row["env_steps_total"], row["evaluation_return_mean"]] for row in curve] for curve in rows]
    return [[point for point in curve if point[0] <= most_steps] for curve in curves]


def differences(curves: dict[str, Curve]) -> dict[str, dict[str, list[float]]]:
    """Of losses between the first layout and each other, the largest over the first ``COMPARED_STEPS`` gradient steps.

    Of the value loss relative; of the policy loss, which is about 0, absolute.
    """
    losses = {layout: np.array(each["losses"]) for layout, each in curves.items()}
    whole, *_ = losses.values()
    columns = {
        "value_loss": whole[:, METRICS.index("value_loss")],
        "policy_loss": np.ones(len(whole)),
    }
    return {
        layout: {
            name: [
                float(np.abs((each - whole)[:steps, METRICS.index(name)] / scale[:steps]).max())
                for steps in COMPARED_STEPS
                if steps <= len(whole)
            ]
            for name, scale in columns.items()
        }
        for layout, each in losses.items()
        if each is not whole
    }


def standing_still() -> float:
    """Mean return without any torque."""
    env = make_env_factory(TASK)(num_envs=EVALUATION_EPISODES, first_env_index=0, seed=0, num_threads=1)
    found = evaluate(env, _Still(env.info.action.dim), EVALUATION_EPISODES).mean_return()
    env.close()
    return found


class _Still:
    """No torque at any joint."""

    def __init__(self, action_dim: int) -> None:
        self._action_dim = action_dim

    def act_greedily(self, obs: torch.Tensor) -> torch.Tensor:
        """Zeros."""
        return torch.zeros((len(obs), self._action_dim))

    def reset(self, ids: torch.Tensor) -> None:
        """No-op."""


def thinned(found: Curve, per_update: int) -> Curve:
    """Losses as means over each update, for the result file."""
    losses = np.array(found["losses"]).reshape(-1, per_update, len(METRICS)).mean(1)
    return {**found, "losses": [[float(f"{value:.6g}") for value in row] for row in losses]}


def draw(report: dict[str, Any], path: Path) -> None:
    """Returns against environment steps, one line a layout and seed; and the value loss of every update."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    size = report["settings"]["num_envs"] * report["settings"]["rollout_length"]
    styles = dict(zip(LAYOUTS, ("-", "--", ":", "-."), strict=True))
    for number, run in enumerate(report["seeds"]):
        for layout, found in run["layouts"].items():
            style = {"linestyle": styles[layout], "color": f"C{number}"}
            label = f"MAT {layout}, seed {run['seed']}"
            left.plot(*np.array(found["greedy"]).T, marker=".", label=label, **style)
            losses = np.array(found["losses"])[:, METRICS.index("value_loss")]
            right.plot(size * np.arange(1, len(losses) + 1), losses, **style)
    for number, points in enumerate(report["ppo"]):
        if points:
            left.plot(
                *np.array(points).T, marker=".", color="grey", label=None if number else "PPO, one agent"
            )
    left.set_ylabel("mean return of greedy episodes")
    left.legend()
    right.set_ylabel("value loss of MAT")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("environment steps")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: give at least 1")
    return value


def main() -> None:
    """Run all layouts of all seeds."""
    parser = command_line(__doc__)
    parser.add_argument("--updates", type=_positive, default=80, help="rollouts, each followed by an update")
    parser.add_argument(
        "--evaluate-every", type=_positive, default=20, help="updates between greedy evaluations"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["1x1"], help="trainers x shards")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--envs", type=_positive, default=32, help="environments of all trainers together, even"
    )
    parser.add_argument("--epochs", type=_positive, default=5)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--units", type=_positive, default=64)
    parser.add_argument("--out", type=Path, help="JSON file of the results; the plot is beside it")
    given = parser.parse_args()
    if given.envs % 2:
        parser.error(f"--envs {given.envs}: two trainers share them equally, so give an even number")
    if given.out and not given.out.absolute().parent.is_dir():
        parser.error(f"--out {given.out}: make the folder {given.out.parent} first")
    torch.set_num_threads(1)
    settings = TeamSettings(
        num_envs=given.envs, num_epochs=given.epochs, learning_rate=given.learning_rate, units=given.units
    )
    most_steps = given.updates * settings.num_envs * settings.rollout_length
    per_update = settings.num_epochs * settings.num_minibatches
    report: dict[str, Any] = {
        "origin": origin(), "task": TASK, "settings": asdict(settings), "metrics": METRICS, "compared_steps": COMPARED_STEPS,
        "standing_still": standing_still(), "ppo": ppo_curves(PPO, most_steps), "seeds": [],
    }  # fmt: skip
    for seed in given.seeds:
        curves: dict[str, Curve] = {}
        run: dict[str, Any] = {"seed": seed}
        report["seeds"].append(run)
        for layout in given.layouts:
            curves[layout] = curve_of(
                layout,
                replace(settings, seed=seed),
                updates=given.updates,
                evaluate_every=given.evaluate_every,
            )
            found = curves[layout]
            print(
                f"seed {seed}, {layout}: training {found['training']}, greedy {found['greedy']}", flush=True
            )
            run["layouts"] = {name: thinned(each, per_update) for name, each in curves.items()}
            run["largest_difference"] = differences(curves)
            if given.out:  # after each, so that a later one that fails costs nothing
                given.out.write_text(json.dumps(report) + "\n")
                draw(report, given.out.with_suffix(".png"))
        for layout, found in run["largest_difference"].items():
            print(f"seed {seed}: largest difference of losses of {layout}: {found}", flush=True)
    print(f"standing still: {report['standing_still']:.1f}")


if __name__ == "__main__":
    main()
