"""Return per wall-clock minute of rayagi's off-policy algorithms, its PPO, and SAC of Stable-Baselines3 and CleanRL.

    experiments/peers/setup.sh PEERS      # virtual environments of the other libraries
    python -m experiments.off_policy.compare Ant-v5 --peers PEERS --time 240 --seeds 0 1 2

One run at a time, on all cores: of each seed, every variant in turn. Writes results/TASK.json (curves and origin) and .png
after each run; started again, it measures what is missing. Training time of rayagi includes its evaluations, that of the
others does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.learning.run import read_curve, train
from experiments.origin import origin

HERE = Path(__file__).parent
PEERS = ("sb3", "cleanrl")
Curve = list[list[float]]
"""Rows of [training seconds, environment steps, mean return, its standard deviation]."""


def ours(algorithm: str, seed: int, given: argparse.Namespace) -> Curve:
    """Train with rayagi's preset."""
    settings = {
        "algorithm": algorithm,
        "time": f"{given.time}s",
        "label": f"{given.task}_off_policy",
        "set": [],
        "evaluate_every": given.evaluate_every.get(algorithm),
        "stop_return": None,
        "runs": given.runs,
    }
    rows = read_curve(train(given.task, seed, argparse.Namespace(**settings)))
    names = ("train_s", "env_steps_total", "evaluation_return_mean", "evaluation_return_std")
    return [[row[name] for name in names] for row in rows]


def peer(name: str, seed: int, given: argparse.Namespace) -> Curve:
    """Train with another library, in its virtual environment."""
    python = Path(given.peers) / "base" / "bin" / "python"
    command = [str(python), "-m", "experiments.off_policy.peer", name, "--task", given.task]
    command += ["--seconds", str(given.time), "--seed", str(seed), "--every", str(given.time / 12)]
    quiet = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=quiet)
    curve: Curve = json.loads(ran.stdout.splitlines()[-1])
    return curve


def reached(curve: Curve, second: float) -> float | None:
    """Mean return of the last evaluation up to a second; None if none was made by then.

    Not of the best one: a policy that has not begun to learn stands still, which is worth nearly 1000 in Ant-v5.
    """
    return next((row[2] for row in reversed(curve) if row[0] <= second), None)


def table(report: dict[str, Any]) -> str:
    """Markdown: return after a quarter, half and all of the time, mean over seeds (least - most)."""
    times = [report["time"] * part for part in (0.25, 0.5, 1.0)]
    head = "".join(f" after {second:.0f} s |" for second in times)
    lines = [f"| variant | steps |{head}", "|---|---|" + "---|" * len(times)]
    for variant in report["variants"]:
        curves = [run["curve"] for run in report["runs"] if run["variant"] == variant and run["curve"]]
        if not curves:
            continue
        cells = []
        for second in times:
            found = [at for curve in curves if (at := reached(curve, second * 1.02)) is not None]
            whole = len(found) == len(curves)
            cells.append(
                f"{statistics.fmean(found):,.0f} ({min(found):,.0f} - {max(found):,.0f})" if whole else "-"
            )
        steps = statistics.fmean(curve[-1][1] for curve in curves)
        lines.append(f"| {variant} | {steps / 1e3:,.0f} k | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Mean evaluation return against training time, one line a seed, one colour a variant."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, variant in enumerate(report["variants"]):
        own = [run["curve"] for run in report["runs"] if run["variant"] == variant]
        for place, curve in enumerate(own):
            label = variant if place == 0 else None
            axes.plot(
                [row[0] / 60 for row in curve], [row[2] for row in curve], color=f"C{number}", label=label
            )
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("mean evaluation return")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(f"{report['task']}, {os.cpu_count()} cores")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("--variants", nargs="+", default=["sac", *PEERS, "ppo"])
    parser.add_argument(
        "--peers", type=Path, default=Path("PEERS"), help="folder of experiments/peers/setup.sh"
    )
    parser.add_argument("--time", type=float, default=240.0, help="seconds of training of a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--evaluate-every",
        type=json.loads,
        default={},
        help='iterations between evaluations, as {"sac": 500}',
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    path = HERE / "results" / f"{given.task}.json"
    path.parent.mkdir(exist_ok=True)
    report: dict[str, Any] = {"task": given.task, "time": given.time, "runs": []}
    if path.exists():
        report = json.loads(path.read_text())
    report |= {"variants": given.variants}
    for seed in given.seeds:
        for variant in given.variants:
            if any((run["variant"], run["seed"]) == (variant, seed) for run in report["runs"]):
                continue
            curve = (peer if variant in PEERS else ours)(variant, seed, given)
            report["runs"].append({"variant": variant, "seed": seed, "origin": origin(), "curve": curve})
            # After each run, so that a later one that fails costs nothing.
            path.write_text(json.dumps(report) + "\n")
            draw(report, path.with_suffix(".png"))
            print(table(report), flush=True)


if __name__ == "__main__":
    main()
