"""What policy lag costs and gains: return against wall clock with the bound on lag at 0, 1, 2, 4 and 8, over several seeds.

    python -m experiments.asynchronous.lag Ant-v5                  # 15 runs of 70 s, about 20 minutes
    python -m experiments.asynchronous.lag Ant-v5 --algorithm impala --evaluate-every 400

One `rayagi train` after another, seeds in the outer loop. Writes results/lag_<task>_<algorithm>.json (curve, actual lag and
dropped rows of every run, and origin) and .png. Started again, it measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.learning.run import read_curve, train
from experiments.scripts import command_line, origin, write_results
from rayagi.run.experience_record import load

HERE = Path(__file__).parent
COLOURS = ("#222222", "#4477aa", "#228833", "#ccbb44", "#ee6677")


def run_one(given: argparse.Namespace, lag: int, seed: int) -> dict[str, Any]:
    """Train with one bound and one seed; its curve and the lag that it had."""
    settings = {
        **vars(given),
        "label": f"{given.task}_lag{lag}",
        "set": [f"{given.algorithm}.max_lag={lag}", *given.set],
        "stop_return": None,
    }
    folder = train(given.task, seed, argparse.Namespace(**settings))
    experience = load(folder) or {"lags": {}, "rows": {}}
    return {"max_lag": lag, "seed": seed, "curve": read_curve(folder), **lag_facts(experience)}


def lag_facts(experience: Mapping[str, Any]) -> dict[str, Any]:
    """Mean and largest lag of the rows that were learned from, and the share that was dropped."""
    lags = {int(lag): rows for lag, rows in experience["lags"].items()}
    total, rows = sum(lags.values()), experience["rows"]
    return {
        "lag_mean": sum(lag * count for lag, count in lags.items()) / total if total else 0.0,
        "lag_max": max(lags, default=0),
        "dropped_share": rows["dropped"] / rows["sent"] if rows.get("sent") else 0.0,
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per bound: actual lag, and over seeds the mean and spread of the last evaluation and of the steps."""
    rows = []
    for lag in sorted({run["max_lag"] for run in runs}):
        own = [run for run in runs if run["max_lag"] == lag and run["curve"]]
        last = [run["curve"][-1]["evaluation_return_mean"] for run in own]
        rows.append(
            {
                "max_lag": lag,
                "seeds": len(own),
                "lag_mean": statistics.mean(run["lag_mean"] for run in own),
                "lag_max": max(run["lag_max"] for run in own),
                "dropped_share": statistics.mean(run["dropped_share"] for run in own),
                "last_return": statistics.mean(last),
                "last_return_low": min(last),
                "last_return_high": max(last),
                "env_steps": statistics.mean(run["curve"][-1]["env_steps_total"] for run in own),
            }
        )
    return rows


def draw(report: dict[str, Any], path: Path) -> None:
    """Evaluation return against training time, one colour per bound and one line per seed; and the last return by lag."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1), sharey=True)
    for row, colour in zip(report["summary"], COLOURS * len(report["summary"]), strict=False):
        label: str | None = f"bound {row['max_lag']}: lag {row['lag_mean']:.1f}, at most {row['lag_max']}"
        for run in report["runs"]:
            if run["max_lag"] == row["max_lag"]:
                points = [(point["train_s"], point["evaluation_return_mean"]) for point in run["curve"]]
                left.plot(*zip(*points, strict=True), color=colour, linewidth=1, label=label)
                label = None
        spread = [
            [row["last_return"] - row["last_return_low"]],
            [row["last_return_high"] - row["last_return"]],
        ]
        right.errorbar([row["lag_mean"]], [row["last_return"]], spread, color=colour, marker="o", capsize=3)
    left.set_xlabel("seconds, evaluations included")
    left.set_ylabel("mean evaluation return")
    left.legend(fontsize=8)
    right.set_xlabel("mean lag, updates")
    right.set_title("last evaluation: mean and range of seeds", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report['task']}, {report['algorithm']}: bound on policy lag", fontsize=10)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("task", nargs="?", default="Ant-v5")
    parser.add_argument("--algorithm", default="appo", choices=("appo", "impala"))
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--time", default="70s", help="training time of one run")
    parser.add_argument("--evaluate-every", type=int, default=20, help="updates between evaluations")
    parser.add_argument("--set", nargs="+", default=[], help="settings, as `rayagi train --set` takes them")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"lag_{given.task}_{given.algorithm}.json"
    report: dict[str, Any] = {
        "task": given.task,
        "algorithm": given.algorithm,
        "time": given.time,
        "runs": [],
    }
    if path.exists():
        report = json.loads(path.read_text())
    report["origin"] = origin()
    known = {(run["max_lag"], run["seed"]) for run in report["runs"]}
    for seed in given.seeds:
        for lag in given.lags:
            if (lag, seed) in known:
                continue
            report["runs"].append(run_one(given, lag, seed))
            report["summary"] = summary(report["runs"])
            write_results(path, report)  # after each: one that fails costs nothing
            draw(report, path.with_suffix(".png"))
    for row in report["summary"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
