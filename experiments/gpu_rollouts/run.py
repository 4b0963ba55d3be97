"""Rollouts on a GPU: one graph, the same operations one by one, and the loop through the host.

    python -m experiments.gpu_rollouts.run --seconds 5 --repeats 3

For each task and N the modes are interleaved; first, for one N, launches of an iteration against T. Needs a GPU and the
extra ``gpu``, and says so where they are missing. Writes a JSON file and a table into ``results/``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from experiments.gpu_rollouts.cases import MODES, Case, measure, ratios
from experiments.scripts import command_line, origin, write_results
from rayagi.envs.tasks.provider import TASKS

NUM_ENVS, NUM_STEPS = (256, 1024, 4096, 16384), 32
LAUNCH_STEPS, LAUNCH_ENVS = (8, 16, 32), 1024
RESULTS = Path(__file__).parent / "results"


def missing() -> str | None:
    """What this machine lacks; None where it has all."""
    if not torch.cuda.is_available():
        return "there is no GPU here"
    if find_spec("mujoco_warp") is None:
        return "the extra 'gpu' is not installed: pip install 'rayagi[gpu]'"
    return None


def rounds(tasks: list[str], num_envs: list[int], repeats: int) -> Iterator[list[Case]]:
    """Cases to run one after the other; those of a round are compared."""
    for task in tasks:
        yield [Case(task, LAUNCH_ENVS, steps, "captured", True) for steps in LAUNCH_STEPS]
    for _ in range(repeats):
        for task in tasks:
            for count in num_envs:
                for update in (True, False):
                    yield [Case(task, count, NUM_STEPS, mode, update) for mode in MODES]


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over the repeats."""
    keys = ("task", "num_envs", "num_steps", "update", "mode")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in keys), []).append(run)
    lines = [
        "| task | N | T | work | mode | steps/s, median | lowest - highest | against the host loop | launches | GPU share |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, count, steps, update, mode), found in groups.items():
        rates = [run["steps_per_s"] for run in found]
        against = [run["against_host"] for run in found if run.get("against_host")]
        ratio = f"{median(against):.1f}" if against else "-"
        work = "rollout and update" if update else "rollout"
        launches, share = found[-1]["launches"], median(run["gpu_share"] for run in found)
        lines.append(
            f"| {task} | {count} | {steps} | {work} | {mode} | {median(rates):,.0f} | {min(rates):,.0f} - {max(rates):,.0f} "
            f"| {ratio} | {launches} | {share:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; returns the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=list(NUM_ENVS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if (lack := missing()) is not None:
        print(f"Nothing was measured: {lack}.", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name()
    stem = f"{gpu.replace(' ', '_').lower()}_{time.strftime('%Y-%m-%d_%H%M')}"
    head = {**origin(), "gpu": gpu, "seconds": arguments.seconds}
    runs: list[dict[str, Any]] = []
    failed = 0
    for cases in rounds(arguments.tasks, arguments.num_envs, arguments.repeats):
        found: list[dict[str, Any]] = []
        for case in cases:
            try:
                found.append(measure(case, arguments.seconds))
            except Exception as error:  # of one case: the others are compared all the same
                failed += 1
                text = f"{type(error).__name__}: {error}"
                print(json.dumps({"case": repr(case), "failed": text}), flush=True)
        against = ratios(found)
        for run in found:
            run["against_host"] = against.get(run["mode"])
            print(json.dumps(run), flush=True)
        runs += found
        write_results(arguments.out / f"{stem}.json", {"origin": head, "runs": runs})
    (arguments.out / f"{stem}.md").write_text(f"{gpu}\n\n{table(runs)}")
    print(table(runs))
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
