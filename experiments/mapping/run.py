"""Every template in serving and in training, interleaved over several repeats, beside what the placement model predicts.

    python -m experiments.mapping.run --tasks Ant-v5 HalfCheetah-v5 --num-envs 32 128 --repeats 5 --seconds 10

With the defaults (Ant-v5, one size, three repeats of 4 s) it takes eight to twenty minutes on two idle cores.

Writes results/<date>.json (raw lines and origin), results/<date>.md (medians, spread, predictions) and results/<date>.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from experiments.mapping.cases import TEMPLATES, Case, cases
from experiments.mapping.plots import draw
from experiments.mapping.summary import Row, rows_of, table
from experiments.origin import origin
from experiments.throughput.run import Case as Command
from experiments.throughput.run import run_case

HERE = Path(__file__).parent


def command(case: Case, seconds: float) -> Command:
    """What measures a case, in a process of its own."""
    options = ("--num-envs", str(case.num_envs), "--seconds", str(seconds))
    module = (sys.executable, "-m", "experiments.mapping.one")
    return Command(case.name, (*module, case.task, case.mode, case.template.name, *options))


def costs_command(task: str, num_envs: int) -> Command:
    """What measures the model's parameters."""
    module = (sys.executable, "-m", "experiments.mapping.one")
    return Command(
        f"{task}, {num_envs} environments, unit costs", (*module, task, "costs", "--num-envs", str(num_envs))
    )


def measure_costs(tasks: Sequence[str], num_envs: Sequence[int]) -> list[dict[str, object]]:
    """Raw lines: the unit costs of every size."""
    sizes = [(task, count) for task in tasks for count in num_envs]
    return [
        {"task": task, "num_envs": count, **run_case(costs_command(task, count))} for task, count in sizes
    ]


def measure_repeat(repeat: int, given: argparse.Namespace) -> list[dict[str, object]]:
    """Raw lines of every case, once."""
    lines: list[dict[str, object]] = []
    for case in cases(given.tasks, given.modes, given.num_envs):
        line = {"repeat": repeat, **case.to_dict(), **run_case(command(case, given.seconds))}
        lines.append(line)
        told = line.get("steps_per_s", line.get("failed"))
        print(repeat, case.name, told, line.get("other_cores"), flush=True)
    return lines


def write(
    stem: Path,
    header: dict[str, object],
    lines: Sequence[dict[str, object]],
    costs: Sequence[dict[str, object]],
    rows: Sequence[Row],
) -> None:
    """The three result files, of what there is so far."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    content = {"origin": header, "costs": costs, "rows": lines}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    told = "\n".join(f"- {key}: {value}" for key, value in header.items())
    failed = "\n".join(f"- {line['case']} failed: {line['failed']}" for line in lines if "failed" in line)
    stem.with_suffix(".md").write_text(f"# Templates\n\n{told}\n\n{table(rows)}\n\n{failed}".rstrip() + "\n")
    draw(rows, stem.with_suffix(".png"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["Ant-v5"])
    parser.add_argument("--modes", nargs="+", default=list(TEMPLATES), choices=list(TEMPLATES))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of each measurement, starting not included"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    header, stem = origin(), given.out / datetime.now(UTC).strftime("mapping_%Y-%m-%d_%H%M")
    costs, lines = measure_costs(given.tasks, given.num_envs), list[dict[str, object]]()
    for repeat in range(given.repeats):
        lines += measure_repeat(repeat, given)
        # What is cut short leaves what it has measured.
        write(stem, header, lines, costs, rows_of(lines, costs))
    print(table(rows_of(lines, costs)))


if __name__ == "__main__":
    main()
