"""Asynchronous against synchronous training of one task: speed, interleaved, and an asynchronous learning curve.

    python -m experiments.asynchronous.run Ant-v5 --repeats 5 --seconds 20 --time 20m

Writes results/<task>.json (every line as it comes, and origin), .md (medians, spread, ages of experience) and .png (the
curve). Started again, it goes on: what is in the .json is not measured again, and the run of the curve is resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.learning.run import read_curve
from experiments.scripts import bullets, command_line, origin, run_program, spread, write_results
from experiments.throughput.run import Case, run_case
from rayagi.run.experience_record import facts, histogram, load

HERE = Path(__file__).parent
LEARNING = HERE.parent / "learning" / "results"
"""Synchronous curves of the same tasks."""
BASELINE = "ppo, dp_only"

CASES: dict[str, tuple[str, ...]] = {
    BASELINE: ("ppo",),
    "appo, dp_only": ("appo",),
    "ppo, ea_t": ("ppo", "--template", "ea_t"),
    "appo, decoupled, wait": (
        "appo",
        "--template",
        "decoupled",
        "--set",
        "appo.on_stale=wait",
        "appo.max_lag=1",
    ),
    "appo, decoupled, correct": (
        "appo",
        "--template",
        "decoupled",
        "--set",
        "appo.on_stale=correct",
    ),
}


def command(task: str, case: str, seconds: float) -> Case:
    """What measures a case, in a process of its own."""
    module = (sys.executable, "-m", "experiments.asynchronous.one", task)
    return Case(case, (*module, *CASES[case], "--seconds", str(seconds)))


def lag_text(line: dict[str, Any]) -> str:
    """Mean and largest lag of a measurement."""
    lags = {int(lag): rows for lag, rows in line.get("lags", {}).items()}
    if not lags:
        return "0"
    return f"{sum(lag * rows for lag, rows in lags.items()) / sum(lags.values()):.2f} (most {max(lags)})"


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Medians over repeats, with the ratio to the baseline of the same repeat."""
    base = {
        line["repeat"]: line["steps_per_s"]
        for line in lines
        if line["case"] == BASELINE and "steps_per_s" in line
    }
    rows = [
        "| training | runs | PPS, median | lowest - highest | over ppo, dp_only | TTP, median | lag of the last run |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        own = [line for line in lines if line["case"] == case and "steps_per_s" in line]
        if not own:
            continue
        speeds = [line["steps_per_s"] for line in own]
        ratios = [line["steps_per_s"] / base[line["repeat"]] for line in own if line["repeat"] in base]
        ratio = spread(ratios)
        samples = statistics.median(line["samples_per_s"] for line in own)
        rows.append(
            f"| {case} | {len(own)} | {statistics.median(speeds):.0f} | {min(speeds):.0f} - {max(speeds):.0f} | {ratio} | "
            f"{samples:.0f} | {lag_text(own[-1])} |"
        )
    failed = [f"- {line['case']} failed: {line['failed']}" for line in lines if "failed" in line]
    return "\n".join([*rows, "", *failed]).rstrip()


def train(task: str, given: argparse.Namespace) -> Path:
    """The asynchronous run, from where it is to its time. Returns its folder."""
    folder: Path = given.runs / f"{task}-asynchronous-seed{given.seed}"
    command = [sys.executable, "-m", "rayagi", "train"]
    if (folder / "run.json").exists():
        if json.loads((folder / "run.json").read_text())["status"] == "finished":
            return folder
        command += ["--resume", str(folder), "--time", given.time]
    else:
        command += [task, "--algorithm", "appo", "--seed", str(given.seed), "--time", given.time]
        command += [
            "--evaluate-every",
            str(given.evaluate_every),
            "--out",
            str(given.runs),
            "--name",
            folder.name,
        ]
    run_program(command)
    return folder


def draw(report: dict[str, Any], path: Path) -> None:
    """Mean evaluation return of the asynchronous run against training time, beside synchronous ones."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    earlier = LEARNING / f"{report['task']}.json"
    if earlier.exists():
        for place, seed in enumerate(json.loads(earlier.read_text())["seeds"]):
            points = [(row["train_s"] / 60, row["evaluation_return_mean"]) for row in seed["curve"]]
            label = "ppo, synchronous (experiments/learning)" if place == 0 else None
            axes.plot(*zip(*points, strict=True), color="#bbbbbb", linewidth=1, label=label)
    points = [(row["train_s"] / 60, row["evaluation_return_mean"]) for row in report["curve"]]
    axes.plot(*zip(*points, strict=True), marker=".", color="#4477aa", label="appo, asynchronous")
    axes.set_xlabel("minutes, evaluations included")
    axes.set_ylabel("mean evaluation return")
    axes.set_title(f"{report['task']}: {report['plan'].strip().splitlines()[-1].split('.')[0]}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def write(report: dict[str, Any], out: Path) -> None:
    """All results as they stand."""
    task = report["task"]
    write_results(out / f"{task}.json", report)
    parts = [f"# {task}: asynchronous and synchronous", bullets(report["origin"]), table(report["lines"])]
    if report.get("curve"):
        last = report["curve"][-1]
        best = max(row["evaluation_return_mean"] for row in report["curve"])
        parts.append(
            f"Asynchronous run, seed {report['seed']}: evaluation {last['evaluation_return_mean']:.0f} after "
            f"{last['train_s'] / 60:.1f} minutes and {last['env_steps_total'] / 1e6:.2f} M steps, best {best:.0f}.\n"
        )
        parts.append(bullets(dict(facts(report["experience"]))))
        parts.append(f"Policy lag in updates, share of rows:\n\n```\n{histogram(report['experience'])}\n```")
        draw(report, out / f"{task}.png")
    (out / f"{task}.md").write_text("\n\n".join(parts) + "\n")


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("task", nargs="?", default="Ant-v5")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of speed")
    parser.add_argument("--time", default="20m", help="training time of the curve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=40, help="updates between evaluations")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    path = given.out / f"{given.task}.json"
    report: dict[str, Any] = {"task": given.task, "seed": given.seed, "lines": []}
    if path.exists():
        report = json.loads(path.read_text())
    report["origin"] = origin()
    known = {(line["repeat"], line["case"]) for line in report["lines"] if "failed" not in line}
    for repeat in range(given.repeats):
        for case in CASES:
            if (repeat, case) in known:
                continue
            line = {"repeat": repeat, **run_case(command(given.task, case, given.seconds))}
            report["lines"].append(line)
            write(report, given.out)  # after each, so that one that fails costs nothing
            print(
                repeat, case, line.get("steps_per_s", line.get("failed")), line.get("other_cores"), flush=True
            )
    folder = train(given.task, given)
    report |= {
        "config": (folder / "config.yaml").read_text(),
        "plan": (folder / "plan.txt").read_text(),
        "curve": read_curve(folder),
        "experience": load(folder),
    }
    write(report, given.out)
    print((given.out / f"{given.task}.md").read_text())


if __name__ == "__main__":
    main()
