"""Return against seconds: rayagi's algorithms with their presets beside other libraries with their users' settings.

    experiments/peers/setup.sh PEERS      # virtual environments of the other libraries
    python -m experiments.learning.compare Ant-v5 HalfCheetah-v5 --peers PEERS --time 120
    python -m experiments.learning.compare Ant-v5 --peers PEERS --variants sac sb3-sac cleanrl-sac --out FOLDER/sac.json

A variant is an algorithm of rayagi's, such as ``ppo``; the same in one process with as many threads as there are cores,
``ppo-one-process``; or one of peer.py. One run at a time, on all cores: of each task and seed, every variant in turn. Writes
curves, origin and a .png after each run; started again, it measures what is missing. Training time of rayagi includes its
evaluations, that of the others does not. Whether a library's idle threads spin or sleep, where --threads is more than 1, is
found out by a short run of each: the faster counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.learning.run import read_curve, train
from experiments.scripts import command_line, origin, run_program, task_id
from experiments.throughput.watch import EITHER, WaitPolicy
from rayagi.config.presets import preset

HERE = Path(__file__).parent
PEERS = ("sb3-ppo", "cleanrl-ppo", "sb3-sac", "cleanrl-sac", "rl-games-ppo", "sf-ppo", "rllib-ppo")
ONE_PROCESS = "-one-process"
SHORT_S = 40.0
"""Of training, to find out how threads should wait. Its second half counts: rl_games compiles its networks in the first."""
Curve = list[list[float]]
"""Rows of [training seconds, environment steps, mean return, its standard deviation]."""


def ours(task: str, variant: str, seed: int, given: argparse.Namespace) -> Curve:
    """Train with rayagi's preset."""
    algorithm = variant.removesuffix(ONE_PROCESS)
    settings = {
        "task": task,
        "algorithm": algorithm,
        "time": f"{given.time}s",
        # With the time: the folder of a run that was cut short stays, and its name is taken.
        "label": f"{given.out.stem}_{task}_{variant}_{time.strftime('%m%d-%H%M%S')}",
        "set": [] if variant == algorithm else in_one_process(task, algorithm),
        "evaluate_every": given.evaluate_every.get(algorithm),
        "stop_return": None,
        "runs": given.runs,
    }
    rows = read_curve(train(task, seed, argparse.Namespace(**settings)))
    names = ("train_s", "env_steps_total", "evaluation_return_mean", "evaluation_return_std")
    return [[row[name] for name in names] for row in rows]


def in_one_process(task: str, algorithm: str) -> list[str]:
    """Settings of one GMI with all cores and all of the preset's environments."""
    cores = len(os.sched_getaffinity(0))
    envs = preset(task, algorithm).gmi.envs
    return ["gmi.num_gmis=1", f"gmi.num_envs={envs}", f"gmi.threads_per_gmi={cores}"]


def peer(
    task: str,
    name: str,
    seed: int,
    given: argparse.Namespace,
    waiting: WaitPolicy,
    seconds: float,
    times: int,
) -> Curve:
    """Train with another library, in its virtual environment.

    Args:
        task: Gymnasium's name
        name: one of ``PEERS``
        seed: of the run
        given: the command line
        waiting: how OpenMP's idle threads do
        seconds: of training
        times: that the policy is evaluated, at equal intervals
    """
    command = [str(python_of(name, given.peers)), "-m", "experiments.learning.peer", name, "--task", task]
    command += ["--seed", str(seed), "--seconds", str(seconds), "--every", str(seconds / times)]
    command += ["--threads", str(given.threads)]
    environment = {**os.environ} if waiting is None else {**os.environ, "OMP_WAIT_POLICY": waiting}
    ran = run_program(command, stdout=subprocess.PIPE, env=environment)
    curve: Curve = json.loads(ran.stdout.splitlines()[-1])
    return curve


def python_of(name: str, peers: Path) -> Path:
    """The interpreter that has a library. rayagi's own has RLlib."""
    if name == "rllib-ppo":
        return Path(sys.executable)
    return peers / ("sf" if name == "sf-ppo" else "base") / "bin" / "python"


def faster_way(task: str, name: str, given: argparse.Namespace, rows: Iterable[dict[str, Any]]) -> WaitPolicy:
    """How OpenMP's idle threads wait where a library makes steps faster in a short run; as in ``rows``, if it is in one.

    With one thread none waits.
    """
    if given.threads == 1:
        return "PASSIVE"
    same = (row for row in rows if (row["task"], row["variant"]) == (task, name))
    known: list[WaitPolicy] = [row["waiting"] for row in same if "waiting" in row]
    if known:
        return known[0]
    rates = {way: late_rate(peer(task, name, given.seeds[0], given, way, SHORT_S, 2)) for way in EITHER}
    print(f"{task}, {name}: steps/s by how threads wait: {rates}", flush=True)
    return max(rates, key=lambda way: rates[way])


def late_rate(curve: Curve) -> float:
    """Steps per second between the last two evaluations, or until the only one."""
    (first_s, first, *_), (last_s, last, *_) = ([0.0, 0.0], *curve)[-2:]
    return (last - first) / (last_s - first_s)


def reached(curve: Curve, second: float) -> float | None:
    """Mean return of the last evaluation up to a second; None if none was made by then.

    Not of the best one: a policy that has not begun to learn stands still, which is worth nearly 1000 in Ant-v5.
    """
    return next((row[2] for row in reversed(curve) if row[0] <= second), None)


def curves_of(report: dict[str, Any], task: str, variant: str) -> list[Curve]:
    """Those that have an evaluation, one a seed."""
    rows = (row for row in report["rows"] if (row["task"], row["variant"]) == (task, variant))
    return [row["curve"] for row in rows if row["curve"]]


def tasks_of(report: dict[str, Any]) -> list[str]:
    """Tasks with a run, in their order."""
    return list(dict.fromkeys(row["task"] for row in report["rows"]))


def at_second(curves: Iterable[Curve], second: float) -> list[float]:
    """The returns then, of each seed that was evaluated by then; an evaluation may be 2 % late."""
    return [at for curve in curves if (at := reached(curve, second * 1.02)) is not None]


def table(report: dict[str, Any]) -> str:
    """Markdown: return after a quarter, half and all of the time, mean over seeds (least - most)."""
    times = [report["time"] * part for part in (0.25, 0.5, 1.0)]
    head = "".join(f" after {second:.0f} s |" for second in times)
    lines = [f"| task | variant | steps |{head}", "|---|---|---|" + "---|" * len(times)]
    for task, variant in itertools.product(tasks_of(report), report["variants"]):
        curves = curves_of(report, task, variant)
        if not curves:
            continue
        cells = []
        for found in (at_second(curves, second) for second in times):
            whole = len(found) == len(curves)
            cells.append(
                f"{statistics.fmean(found):,.0f} ({min(found):,.0f} - {max(found):,.0f})" if whole else "-"
            )
        steps = statistics.fmean(curve[-1][1] for curve in curves)
        lines.append(f"| {task} | {variant} | {steps / 1e3:,.0f} k | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Mean evaluation return against training time, one line a seed, one colour a variant, one pair of axes a task."""
    tasks = tasks_of(report)
    columns = min(len(tasks), 3)
    num_rows = -(-len(tasks) // columns)
    made = Figure(figsize=(4.6 * columns + 1, 4 * num_rows), layout="constrained")
    for place, task in enumerate(tasks):
        axes = made.add_subplot(num_rows, columns, place + 1)
        for number, variant in enumerate(report["variants"]):
            for seed, curve in enumerate(curves_of(report, task, variant)):
                axes.plot(
                    [row[0] for row in curve],
                    [row[2] for row in curve],
                    color=f"C{number}",
                    label=variant if seed == 0 else None,
                )
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.3)
        if place % columns == 0:
            axes.set_ylabel("mean evaluation return")
    made.axes[0].legend(fontsize=8)
    made.savefig(path, dpi=90)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("tasks", nargs="+", type=task_id)
    parser.add_argument("--variants", nargs="+", default=["ppo", f"ppo{ONE_PROCESS}", *PEERS[:2]])
    parser.add_argument(
        "--peers", type=Path, default=Path("PEERS"), help="folder of experiments/peers/setup.sh"
    )
    parser.add_argument("--threads", type=int, default=1, help="of a peer's torch (%(default)s)")
    parser.add_argument(
        "--time", type=float, default=120.0, help="seconds of training of a run (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--evaluate-every",
        type=json.loads,
        default={},
        help='iterations between evaluations, as {"sac": 500}',
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "beside.json", help="result file")
    given = parser.parse_args()
    for name in given.variants:
        if name in PEERS and not python_of(name, given.peers).exists():
            parser.error(
                f"{name}: there is no {python_of(name, given.peers)}; experiments/peers/setup.sh makes it, and --peers "
                "names its folder"
            )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"rows": []}
    if given.out.exists():
        report = json.loads(given.out.read_text())
    report |= {"time": given.time, "variants": given.variants}
    for task, seed, variant in itertools.product(given.tasks, given.seeds, given.variants):
        measured = [(row["task"], row["variant"], row["seed"]) for row in report["rows"]]
        if (task, variant, seed) in measured:
            continue
        row = {"task": task, "variant": variant, "seed": seed, "origin": origin(), "threads": given.threads}
        if variant in PEERS:
            row["waiting"] = waiting = faster_way(task, variant, given, report["rows"])
            row["curve"] = peer(task, variant, seed, given, waiting, given.time, 12)
        else:
            row["curve"] = ours(task, variant, seed, given)
        report["rows"].append(row)
        # After each run, so that a later one that fails costs nothing.
        given.out.write_text(json.dumps(report) + "\n")
        draw(report, given.out.with_suffix(".png"))
        print(table(report), flush=True)


if __name__ == "__main__":
    main()
