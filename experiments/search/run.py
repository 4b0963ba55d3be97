"""The search against a full grid on this machine: how good it is, how long it takes, whether its prediction holds.

    python -m experiments.search.run --name quiet

For each task: the search, from nothing; then every point of the grid, as somebody without the search would run it: whole
iterations, in processes that start and end for each point, in a random order; then a real training run with what the search
found; then, fourteen times, again those that came near the best of the grid, in processes that stay. Everything done is
kept in results/<name>.jsonl at once: the same command goes on where it was interrupted. results/<name>.md is written after
each of these stages.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.scripts import bullets, command_line, origin, run_program, task_id
from experiments.throughput.run import wait_until_quiet
from placement.inventory import local_machine
from placement.search import TrialMeasurement, core_counts
from rayagi.config.presets import preset
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.probe import SCREENING, ProbeSettings, SessionProbe
from rayagi.coordinator.searching import SearchSettings, search

HERE = Path(__file__).parent
TRAIN_TIMEOUT_S = 300.0
GRID = ProbeSettings(
    relative_error=0.03,
    min_duration_s=2.0,
    loose_after_s=10.0,
    loose_error=0.1,
    max_duration_s=15.0,
    iteration_s=math.inf,
    max_iteration_s=math.inf,
    warm_up_steps=1,
)
"""Of a point: whole iterations, 3 % where that takes no longer than ten seconds."""
JUDGING = replace(
    GRID, min_duration_s=4.0, loose_after_s=8.0, max_duration_s=10.0, iteration_s=1.0, warm_up_steps=8
)
"""Of a point once more: short, in parts of iterations, and often. The machine's speed changes by a third from one minute to
another, so that few long measurements tell less than many short ones by turns."""
ALWAYS, BEYOND = (16, 32, 64, 128, 256, 512), (1024, 2048, 4096)
"""Environments of a GMI: what every row of the grid has, and what it has where iterations last no longer than a search
would wait for."""
NEAR, MAX_FINALISTS = 0.1, 3
"""Of the grid's best: points within it are measured again, so many of them at most, and what the search found."""
Row = dict[str, Any]
Point = tuple[int, int]
"""GMIs and environments of each."""


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
        started: list[str] = []
        found = search(preset(task), local_machine(), settings, on_start=started.append)
        best = found.best
        done = {
            "kind": "search",
            "task": task,
            "gmis": best.gmis_per_gpu,
            "num_envs": best.num_envs,
            "steps_per_s": best.system_steps_per_s,
            "measurements": len(started),
            "duration_s": round(found.duration_s, 1),
            "tried": [
                [trial.gmis_per_gpu, trial.num_envs, trial.verdict, trial.system_steps_per_s, trial.reason]
                for trial in found.trials
            ],
        }
        journal.add(done)
    return done


def measured(
    journal: Journal, task: str, repeat: int, point: Point, kept: SessionProbe | None = None
) -> float | None:
    """Steps per second of all GMIs at a point, by a probe that is kept or one of its own; None where it failed."""
    gmis, num_envs = point
    place = {"kind": "grid", "task": task, "repeat": repeat, "gmis": gmis, "num_envs": num_envs}
    done = journal.find(**place)
    if done is None:
        wait_until_quiet()
        began = time.monotonic()
        with nullcontext(kept) if kept else SessionProbe(preset(task), local_machine(), GRID) as probe:
            outcome = probe(gmis, num_envs)
        total = outcome.steps_per_s * gmis if isinstance(outcome, TrialMeasurement) else None
        took_s = time.monotonic() - began
        done = {**place, **asdict(outcome), "duration_s": took_s, "system_steps_per_s": total}
        journal.add(done)
    return done["system_steps_per_s"]


def grid(journal: Journal, task: str, counts: tuple[int, ...]) -> None:
    """Every point once: what each row always has in an order of the task's own, then each row to its end."""
    order = [(gmis, num_envs) for gmis in counts for num_envs in ALWAYS]
    random.Random(task).shuffle(order)
    for point in order:
        measured(journal, task, 0, point)
    length = preset(task).learning.rollout_length
    for gmis in counts:
        totals = [measured(journal, task, 0, (gmis, num_envs)) for num_envs in ALWAYS]
        for num_envs in BEYOND:
            fastest = max((total for total in totals if total is not None), default=0.0)
            if gmis * num_envs * length > SCREENING.max_iteration_s * fastest:
                break
            totals.append(measured(journal, task, 0, (gmis, num_envs)))


def judged(journal: Journal, task: str, found: Point, repeats: int) -> None:
    """The contenders again and again, by turns; those with as many GMIs in the same processes."""
    order = sorted(finalists(journal, task, found))
    with SessionProbe(preset(task), local_machine(), JUDGING) as probe:
        for repeat in range(1, 1 + repeats):
            # Backwards every other time: a drift meets all alike.
            for point in order[:: -1 if repeat % 2 else 1]:
                measured(journal, task, repeat, point, probe)


def trained(journal: Journal, found: Row, caches: Path, seconds: float) -> None:
    """A real run with what the search found; what it says of its prediction."""
    task = str(found["task"])
    if journal.find(kind="training", task=task) is not None:
        return
    wait_until_quiet()
    out = caches / "runs" / f"{task}-{os.getpid()}"
    command = [sys.executable, "-m", "rayagi", "train", task, "--gmis", str(found["gmis"])]
    command += ["--num-envs", str(found["num_envs"]), "--time", f"{seconds:g}s", "--out", str(out.parent)]
    run_program(
        [*command, "--name", out.name],
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
    """Verdicts per task, then the grid: mean of the repeats, and their range."""
    lines = [
        "| task | found | of the grid's best | search: measurements, s | grid: points, s | search / grid "
        "| predicted | training | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [verdict(journal, task) for task in tasks if grid_speeds(journal, task)]
    for task in tasks:
        lines += ["", f"## {task}", "", "| GMIs x environments | steps/s, mean | lowest - highest | runs |"]
        lines.append("|---|---|---|---|")
        for (gmis, num_envs), values in sorted(grid_speeds(journal, task).items()):
            spread = f"{min(values):.0f} - {max(values):.0f}"
            lines.append(
                f"| {gmis} x {num_envs} | {statistics.fmean(values):.0f} | {spread} | {len(values)} |"
            )
    return "\n".join(lines)


def verdict(journal: Journal, task: str) -> str:
    """A task's row: how good, how long, how well predicted; what is not done yet is a dash."""
    found, run = journal.find(kind="search", task=task), journal.find(kind="training", task=task)
    assert found is not None
    passes = grid_speeds(journal, task)
    # What was chosen for being fast in the first pass was lucky in it, too: where there are repeats, they alone judge.
    speeds = grid_speeds(journal, task, first_repeat=1) or passes
    best = max(speeds.values(), key=statistics.fmean)
    here = speeds.get((found["gmis"], found["num_envs"]))
    took_s, grid_s = float(found["duration_s"]), grid_seconds(journal, task)
    cells = [
        task,
        f"{found['gmis']} x {found['num_envs']}",
        share_of(best, here) if here else "-",
        f"{found['measurements']}, {took_s:.0f}",
        f"{len(passes)}, {grid_s:.0f}",
        f"{took_s / grid_s:.2f}",
        *(
            [f"{run['predicted_steps_per_s']:.0f}", f"{run['measured_steps_per_s']:.0f}"]
            if run
            else ["-", "-"]
        ),
        f"{run['error']:+.1%}" if run else "-",
    ]
    return f"| {' | '.join(cells)} |"


def share_of(best: list[float], here: list[float]) -> str:
    """The ratio of their means, and its standard error where there are repeats of both.

    Of ten rounds that differ by 8 %, the mean is off by 2.5 % and the median by 3.
    """
    ratio = statistics.fmean(here) / statistics.fmean(best)
    if here == best or min(len(here), len(best)) < 2:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} +- {ratio * math.hypot(error_of(here), error_of(best)):.3f}"


def error_of(values: list[float]) -> float:
    """Standard error of their mean, relative to it."""
    return statistics.stdev(values) / math.sqrt(len(values)) / statistics.fmean(values)


def grid_speeds(journal: Journal, task: str, first_repeat: int = 0) -> dict[Point, list[float]]:
    """Steps per second of all GMIs, by point; without the pass over the whole grid where ``first_repeat`` is 1."""
    speeds: dict[Point, list[float]] = {}
    for row in journal.rows:
        if (row["kind"], row.get("task")) != ("grid", task) or row["repeat"] < first_repeat:
            continue
        if row["system_steps_per_s"] is not None:
            speeds.setdefault((row["gmis"], row["num_envs"]), []).append(row["system_steps_per_s"])
    return speeds


def finalists(journal: Journal, task: str, found: Point) -> list[Point]:
    """The best of the first pass, of those near it, and what was found: only among them can a repeat change the verdict."""
    first = {
        (row["gmis"], row["num_envs"]): float(row["system_steps_per_s"])
        for row in journal.rows
        if (row["kind"], row.get("task"), row.get("repeat")) == ("grid", task, 0)
        and row["system_steps_per_s"]
    }
    ranked = sorted(first, key=lambda point: -first[point])
    near = [point for point in ranked if first[point] >= (1 - NEAR) * first[ranked[0]]]
    return list(dict.fromkeys([*near[:MAX_FINALISTS], found]))


def grid_seconds(journal: Journal, task: str) -> float:
    """What the pass over the whole grid took."""
    rows = [
        row for row in journal.rows if (row["kind"], row.get("task"), row.get("repeat")) == ("grid", task, 0)
    ]
    return sum(float(row["duration_s"]) for row in rows)


def write(journal: Journal, tasks: list[str], path: Path) -> str:
    """The verdicts so far, with their origin, as a page."""
    header = journal.find(kind="origin") or {}
    shown = bullets({key: value for key, value in header.items() if key != "kind"})
    text = f"# The search against the full grid\n\n{shown}\n\n{summarise(journal, tasks)}\n"
    path.write_text(text)
    return text


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--name", required=True, help="names the results; the same name goes on")
    parser.add_argument(
        "--tasks", nargs="+", type=task_id, default=["Ant-v5", "HalfCheetah-v5", "Humanoid-v5"]
    )
    parser.add_argument("--repeats", type=int, default=14, help="of what came near the best (default: 14)")
    parser.add_argument("--train-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    journal = Journal(given.out / f"{given.name}.jsonl")
    caches, page = (given.out / f".{given.name}").resolve(), given.out / f"{given.name}.md"
    if journal.find(kind="origin") is None:
        journal.add({"kind": "origin", **origin()})
    counts = core_counts(local_machine().num_cores)
    with connected():
        found = {task: searched(journal, task, caches) for task in given.tasks}
        for task in given.tasks:
            grid(journal, task, counts)
    write(journal, given.tasks, page)
    for task in given.tasks:
        trained(journal, found[task], caches, given.train_seconds)
    for task in given.tasks:
        with connected():
            place = (int(found[task]["gmis"]), int(found[task]["num_envs"]))
            judged(journal, task, place, given.repeats)
        write(journal, given.tasks, page)
    print(write(journal, given.tasks, page))


if __name__ == "__main__":
    main()
