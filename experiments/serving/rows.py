"""Rows per second of `rayagi serve`'s GMIs, with and without writing, in turns.

python -m experiments.serving.rows --run runs/NAME --output experiments/serving/results/rows.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from experiments.scripts import origin
from experiments.throughput.watch import run_watched
from rayagi.run.atomic import replace_json


def served(run: Path, seconds: float, gmis: int, num_envs: int, file_format: str | None) -> dict[str, object]:
    """One run of the command; what it says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "d"
        options = ["--gmis", str(gmis), "--num-envs", str(num_envs), "--time", f"{seconds:g}s", "--explore"]
        options += [] if file_format is None else ["--out", str(out), "--format", file_format]
        done = run_watched([sys.executable, "-m", "rayagi", "serve", str(run), *options], timeout_s=600)
        (speed,) = [line for line in done.output.splitlines() if "steps/s (" in line]
        found: dict[str, object] = {
            "format": file_format,
            "steps_per_s": float(speed.split(": ")[1].split(" steps/s")[0].replace(",", "")),
            "other_cores": round(done.other_cores, 2),
        }
        if file_format is not None:
            stored = json.loads((out / "statistics.json").read_text())
            found |= {"rows": stored["rows"], "bytes_per_row": round(stored["bytes"] / stored["rows"], 1)}
        return found


def main() -> None:
    """Take turns, another order each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gmis", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    cases: list[str | None] = [None, "parquet", "arrow"]
    for number in range(arguments.rounds):
        for file_format in cases[number % 3 :] + cases[: number % 3]:
            found = served(arguments.run, arguments.seconds, arguments.gmis, arguments.num_envs, file_format)
            rows.append({"round": number, **found})
            print(rows[-1], flush=True)
    medians = {
        file_format or "nothing": statistics.median(
            float(str(row["steps_per_s"])) for row in rows if row["format"] == file_format
        )
        for file_format in cases
    }
    print(medians)
    if arguments.output is not None:
        settings = {"gmis": arguments.gmis, "num_envs": arguments.num_envs, "seconds": arguments.seconds}
        replace_json(
            arguments.output, {"origin": origin(), **settings, "median_steps_per_s": medians, "rows": rows}
        )


if __name__ == "__main__":
    main()
