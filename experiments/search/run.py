"""The search against a full grid on this machine: how good it is, how long it takes, whether its prediction holds.

    python -m experiments.search.run --name quiet

For each task: the search, from nothing; then every point of the grid by the same probe, in a random order; then again those
that came within a tenth of the best; then a real training run with what the search found. Everything done is kept in
results/<name>.jsonl at once: the same command goes on where it was interrupted. Ends with results/<name>.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.origin import origin
from experiments.throughput.run import wait_until_quiet
from placement.inventory import local_machine
from placement.search import Measured, core_counts
from rayagi.config.presets import preset
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.probe import SessionProbe
from rayagi.coordinator.searching import SearchSettings, search

HERE = Path(__file__).parent
TRAIN_TIMEOUT_S = 300.0
Row = dict[str, Any]


class Journal:
    """What is done, a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def find(self, **wanted: object) -> Row | None:
        """The first row with these values."""
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def add(self, row: Row) -> None:
        """Keep a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        print(json.dumps(row)[:200], flush=True)


def searched(journal: Journal, task: str, caches: Path) -> Row:
    """The search of a task, from nothing; its measurements stay for the training run that follows."""
    done = journal.find(kind="search", task=task)
    if done is None:
        wait_until_quiet()
        settings = SearchSettings(folder=caches / "rayagi" / "search", again=True)
        found = search(preset(task), local_machine(), settings)
        best = found.best
        done = {
            "kind": "search",
            "task": task,
            "gmis": best.gmis_per_gpu,
            "num_envs": best.num_envs,
            "steps_per_s": best.system_steps_per_s,
            "trials": len(found.trials),
            "duration_s": round(found.duration_s, 1),
            "tried": [[trial.gmis_per_gpu, trial.num_envs, trial.verdict] for trial in found.trials],
        }
        journal.add(done)
    return done


def grid(journal: Journal, task: str, points: set[tuple[int, int]], repeat: int) -> None:
    """Measure the points once, in an order of this repeat's own."""
    order = sorted(points)
    random.Random(f"{task} {repeat}").shuffle(order)
    for gmis, num_envs in order:
        place = {"kind": "grid", "task": task, "repeat": repeat, "gmis": gmis, "num_envs": num_envs}
        if journal.find(**place) is None:
            wait_until_quiet()
            outcome = SessionProbe(preset(task), local_machine())(gmis, num_envs)
            total = outcome.steps_per_s * gmis if isinstance(outcome, Measured) else None
            journal.add({**place, **asdict(outcome), "system_steps_per_s": total})


def trained(journal: Journal, found: Row, caches: Path, seconds: float) -> None:
    """A real run with what the search found; what it says of its prediction."""
    task = str(found["task"])
    if journal.find(kind="training", task=task) is not None:
        return
    wait_until_quiet()
    out = caches / "runs" / f"{task}-{os.getpid()}"
    command = [sys.executable, "-m", "rayagi", "train", task, "--gmis", str(found["gmis"])]
    command += ["--num-envs", str(found["num_envs"]), "--time", f"{seconds:g}s", "--out", str(out.parent)]
    subprocess.run(
        [*command, "--name", out.name],
        check=True,
        timeout=TRAIN_TIMEOUT_S,
        env=os.environ | {"XDG_CACHE_HOME": str(caches)},
    )
    prediction = out / "prediction.json"
    if not prediction.exists():
        raise SystemExit(
            "the code has changed since the search: its measurements are void; start with another --name"
        )
    journal.add({"kind": "training", "task": task, **json.loads(prediction.read_text())})


def summarise(journal: Journal, tasks: list[str]) -> str:
    """Verdicts per task, then the grid: median of the repeats, and their range."""
    lines = [
        "| task | found | of the grid's best | search / one pass of the grid | predicted | training | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in tasks:
        found, run = journal.find(kind="search", task=task), journal.find(kind="training", task=task)
        if found is None or run is None:
            continue
        speeds = grid_speeds(journal, task)
        best = max(statistics.median(values) for values in speeds.values())
        here = statistics.median(speeds[found["gmis"], found["num_envs"]])
        one_pass_s = grid_seconds(journal, task)
        took_s = float(found["duration_s"])
        lines.append(
            f"| {task} | {found['gmis']} x {found['num_envs']} | {here / best:.3f} | {took_s:.0f} s / {one_pass_s:.0f} s = "
            f"{took_s / one_pass_s:.2f} | {run['predicted_steps_per_s']:.0f} | {run['measured_steps_per_s']:.0f} | "
            f"{run['error']:+.1%} |"
        )
    for task in tasks:
        lines += ["", f"## {task}", "", "| GMIs x environments | steps/s, median | lowest - highest | runs |"]
        lines.append("|---|---|---|---|")
        for (gmis, num_envs), values in sorted(grid_speeds(journal, task).items()):
            spread = f"{min(values):.0f} - {max(values):.0f}"
            lines.append(
                f"| {gmis} x {num_envs} | {statistics.median(values):.0f} | {spread} | {len(values)} |"
            )
    return "\n".join(lines)


def grid_speeds(journal: Journal, task: str) -> dict[tuple[int, int], list[float]]:
    """Steps per second of all GMIs, by point."""
    speeds: dict[tuple[int, int], list[float]] = {}
    for row in journal.rows:
        if row["kind"] == "grid" and row["task"] == task and row["system_steps_per_s"] is not None:
            speeds.setdefault((row["gmis"], row["num_envs"]), []).append(row["system_steps_per_s"])
    return speeds


def contenders(speeds: dict[tuple[int, int], list[float]]) -> set[tuple[int, int]]:
    """Points within a tenth of the best: only among them can a repeat change the verdict."""
    medians = {point: statistics.median(values) for point, values in speeds.items()}
    return {point for point, speed in medians.items() if speed >= 0.9 * max(medians.values())}


def grid_seconds(journal: Journal, task: str) -> float:
    """What the pass over the whole grid took."""
    rows = [
        row for row in journal.rows if (row["kind"], row.get("task"), row.get("repeat")) == ("grid", task, 0)
    ]
    return sum(float(row["duration_s"]) for row in rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="names the results; the same name goes on")
    parser.add_argument("--tasks", nargs="+", default=["Ant-v5", "HalfCheetah-v5", "Humanoid-v5"])
    parser.add_argument("--envs", nargs="+", type=int, default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--train-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    journal = Journal(given.out / f"{given.name}.jsonl")
    caches = (given.out / f".{given.name}").resolve()
    if journal.find(kind="origin") is None:
        journal.add({"kind": "origin", **origin()})
    counts = core_counts(local_machine().num_cores)
    with connected():
        found = {task: searched(journal, task, caches) for task in given.tasks}
        for repeat in range(given.repeats):
            for task in given.tasks:
                chosen = (int(found[task]["gmis"]), int(found[task]["num_envs"]))
                points = {(gmis, num_envs) for gmis in counts for num_envs in given.envs}
                if repeat > 0:
                    points = contenders(grid_speeds(journal, task))
                grid(journal, task, points | {chosen}, repeat)
    for task in given.tasks:
        trained(journal, found[task], caches, given.train_seconds)
    header = journal.find(kind="origin") or {}
    told = "\n".join(f"- {key}: {value}" for key, value in header.items() if key != "kind")
    text = f"# The search against the full grid\n\n{told}\n\n{summarise(journal, given.tasks)}\n"
    (given.out / f"{given.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
