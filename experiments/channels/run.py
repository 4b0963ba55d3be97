"""Experience channels against Ray's object store, torch.multiprocessing's queue and memcpy: all in one run, in turns.

    python -m experiments.channels.run --repeats 5

Writes results/<date>.json (every repeat, and origin) and results/<date>.md (medians, spread, goals).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.channels.batches import TASKS, make, nbytes
from experiments.channels.case import COPIES, WAYS
from experiments.scripts import origin, spread, write_results
from experiments.throughput.run import wait_until_quiet
from experiments.throughput.watch import run_watched

HERE = Path(__file__).parent
TIMEOUT_S = 300.0
GOALS = {"ray": 10.0, "torch-queue": 4.0, **dict.fromkeys(COPIES, 0.5)}
"""How many times as fast as these the channel is to be."""


def measure(way: str, seconds: float) -> dict[str, Any]:
    """One way in a process of its own, on a machine as quiet as it gets.

    Raises:
        SystemExit: it failed.
    """
    wait_until_quiet(limit_s=5.0)
    command = [sys.executable, "-m", "experiments.channels.case", way, "--seconds", str(seconds)]
    watched = run_watched(command, TIMEOUT_S)
    lines = watched.output.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"{way} failed:\n{watched.error[-3000:]}")
    return {**json.loads(lines[-1]), "other_cores": watched.other_cores}


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables of the README."""
    lines = []
    for task in TASKS:
        rates = {way: [one[task]["mb_per_s"] for one in repeats] for way, repeats in found.items()}
        lines += [
            f"**{task}**: batches of {nbytes(make(TASKS[task])) / 1e6:.2f} MB\n",
            "| way | MB/s: median (lowest - highest) | MB per CPU second | put / this (goal) | in place / this (goal) |",
            "|---|---|---|---|---|",
        ]
        for way in found:
            cost = "" if way == "ray" else spread([one[task]["mb_per_cpu_s"] for one in found[way]], ",.0f")
            cells = [way, spread(rates[way], ",.0f"), cost]
            for ours in ("channel-put", "channel-in-place"):
                ratios = [mine / theirs for mine, theirs in zip(rates[ours], rates[way], strict=True)]
                goal = f" ({GOALS[way]:g})" if way in GOALS else ""
                cells.append(spread(ratios, ",.2f") + goal if way in GOALS else "")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines += ["**Latency** of a small batch, microseconds\n", "| way | p50 | p99 |", "|---|---|---|"]
    for way, repeats in found.items():
        if "latency" in repeats[0]:
            cells = [
                spread([one["latency"][name] for one in repeats], ",.0f") for name in ("p50_us", "p99_us")
            ]
            lines.append(f"| {way} | {' | '.join(cells)} |")
    others = [one["other_cores"] for repeats in found.values() for one in repeats]
    lines += ["", f"Cores that something else used meanwhile: {spread(others)}, of {os.cpu_count()}.", ""]
    return "\n".join(lines)


def main() -> None:
    """Measure all ways, in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each throughput")
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in (*COPIES, *WAYS)}
    for repeat in range(arguments.repeats):
        for way, repeats in found.items():
            repeats.append(measure(way, arguments.seconds))
            print(repeat, way, json.dumps(repeats[-1]), flush=True)
    text = report(found)
    place = HERE / "results" / f"channels_{datetime.now(UTC):%Y-%m-%d_%H%M}"
    write_results(place.with_suffix(".json"), {"origin": origin(), "repeats": found})
    place.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
