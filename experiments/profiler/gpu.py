"""How much of a GPU reinforcement learning uses, and what recording it costs.

    python -m experiments.profiler.gpu phases     GPU time over the phases of PPO (GMI-DRL, figure 1b)
    python -m experiments.profiler.gpu workers    beside NVML's utilisation, 1 to 16 processes (RL-Scope, figure 8)
    python -m experiments.profiler.gpu calls      cost of recording each CUDA call (RL-Scope, figure 10)

Needs a GPU, and says so where there is none. Writes ``results/gpu_NAME.json`` after each row.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import IO, Any

import torch
from matplotlib.figure import Figure

from actors.gmi import GmiContext
from experiments.scripts import command_line, origin, task_id, write_results
from placement.types import Slice
from rayagi import profiler
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import default_hidden, make_env_factory
from rayagi.profiler import gpu_calls
from rayagi.profiler.injection import injected
from rayagi.profiler.interception import PACKAGES
from rayagi.profiler.overlap import GPU, breakdown
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.session import DEFAULT_LIMIT_MB, create_profile
from rayagi.profiler.trace import read_profile

RESULTS = Path(__file__).parent / "results"
PHASE_CASES = (
    ("HalfCheetah-v5", 2048),
    ("Ant-v5", 2048),
    ("Humanoid-v5", 2048),
    ("rayagi/Ant-v0", 4096),
    ("rayagi/Anymal-v0", 4096),
    ("rayagi/Humanoid-v0", 4096),
)
WORKERS = (1, 4, 16)
WARM_UP, RECORDED = 3, 10
LONGEST_WAIT_S = 120.0
"""For a process that was started."""


def spec_of(task: str, num_envs: int) -> RunSpec:
    """PPO with the papers' network; physics on the GPU for the project's own tasks, on the host for Gymnasium's."""
    is_own = task.startswith("rayagi/")
    return RunSpec(
        env=EnvSpec(id=task, engine="mujoco_warp") if is_own else EnvSpec(id=task),
        gmi=GmiSpec(num_envs=num_envs),
        network=NetworkSpec(hidden=default_hidden(task)),
        learning=PPOSpec(rollout_length=32, num_epochs=4, num_minibatches=4),
        seed=1,
    )


def program_of(task: str, num_envs: int, num_threads: int) -> Any:
    """A GMI's program, in this process, on the first GPU."""
    spec = spec_of(task, num_envs)
    cores = tuple(range(num_threads))
    context = GmiContext.local(
        task,
        gmi_slice=Slice(node="here", backend="direct", cores=cores, num_threads=num_threads),
        device="cuda:0",
    )
    return TrainingFactory(spec, make_env_factory(task, engine=spec.env.engine))(context)


def phases(task: str, num_envs: int) -> dict[str, Any]:
    """Of each phase of an iteration, its time and for how much of it the GPU worked."""
    program = program_of(task, num_envs, num_threads=os.cpu_count() or 1)
    for _ in range(WARM_UP):
        program.iterate()
    plain = [program.iterate().metrics["iteration_s"] for _ in range(RECORDED)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "profile"
        with profiler.profile(folder, gpu=True):
            times = [program.iterate().metrics["iteration_s"] for _ in range(RECORDED)]
            torch.cuda.synchronize()
        found, trace = breakdown(read_profile(folder)), read_profile(folder).processes[0]
    by_phase: dict[str, dict[str, int]] = defaultdict(lambda: {"ns": 0, "gpu_ns": 0, "kernel_ns": 0})
    for row in found.rows:
        if row.cell.iteration >= 0:
            sums = by_phase[row.cell.operation or "between"]
            sums["ns"] += row.ns
            sums["gpu_ns"] += row.ns * bool(row.categories & GPU)
            sums["kernel_ns"] += row.ns * ("gpu_kernel" in row.categories)
    return {
        "task": task,
        "num_envs": num_envs,
        "collection": type(program.collection).__name__,
        "iterations": RECORDED,
        "iteration_s": round(median(times), 5),
        "unrecorded_iteration_s": round(median(plain), 5),
        "steps_per_s": round(num_envs * program.rollout.num_steps / median(times)),
        "phases": dict(by_phase),
        "gpu_events": sum(each.num_events for each in trace.threads if each.path.name.startswith("gpu")),
        "nvml_utilization": trace.nvml_utilization,
    }


def workers(count: int) -> dict[str, Any]:
    """Processes that collect experience with one policy each on the GPU: their GPU time, and NVML's utilisation."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = create_profile(Path(scratch) / "profile", sys.argv, PACKAGES)
        schedule = Schedule(skip=0, warm_up=0, record=40)
        environment = injected(os.environ, folder, PACKAGES, schedule, DEFAULT_LIMIT_MB, gpu=True)
        command = [sys.executable, "-m", "experiments.profiler.gpu", "worker"]
        processes = [
            subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(count)
        ]
        try:
            for each in processes:  # all of them collect at the same time
                _line(each.stdout)
            for each in processes:
                assert each.stdin is not None
                each.stdin.write("go\n")
                each.stdin.flush()
            steps = [float(_line(each.stdout)) for each in processes]
            for each in processes:
                each.communicate(timeout=LONGEST_WAIT_S)
        finally:
            for each in processes:
                each.kill()
        profile = read_profile(folder)
        found = breakdown(profile)
    own = [
        {
            "whole_ns": sum(sets.values()),
            "gpu_ns": sum(ns for categories, ns in sets.items() if categories & GPU),
        }
        for label, sets in found.totals.items()
        if label and sets
    ]
    by_nvml = [percent for process in profile.processes for percent in process.nvml_utilization.values()]
    together = found.totals[""] if count > 1 else next(sets for sets in found.totals.values() if sets)
    return {
        "workers": count,
        "steps_per_s": round(sum(steps)),
        "by_worker": own,
        "gpu_share_together": sum(ns for sets, ns in together.items() if sets & GPU) / sum(together.values()),
        "nvml_utilization": mean(by_nvml) if by_nvml else None,  # MIG instances have none
    }


def _line(stream: IO[str] | None) -> str:
    assert stream is not None
    if not select.select([stream], [], [], LONGEST_WAIT_S)[0]:
        raise SystemExit(f"a worker has said nothing for {LONGEST_WAIT_S:.0f} s")
    text = stream.readline()
    if not text:
        raise SystemExit("a worker has ended early")
    return text


def worker() -> None:
    """One of the processes: says that it is ready, waits for a line, collects, and says how fast."""
    program = program_of("HalfCheetah-v5", 16, num_threads=1)
    program.collection.collect(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.cuda.synchronize()  # the first start of CUPTI takes seconds: all then record at the same time
    print("ready", flush=True)
    sys.stdin.readline()
    spent = 0.0  # without the start and the end of recording
    for number in range(1, 41):
        with profiler.iteration(), profiler.operation("collect"):
            began = time.perf_counter()
            program.collection.collect(number)
            torch.cuda.synchronize()
            spent += time.perf_counter() - began
    print(40 * 32 * 16 / spent, flush=True)


def calls() -> list[dict[str, Any]]:
    """CPU time of a CUDA call in a program without and with recording, each repeat in a process of its own."""
    repeats = gpu_calls.measured()
    rows = []
    for name in repeats[0]:
        times = [each[name] for each in repeats]
        rows.append(
            {
                "call": name,
                "ns": [round(each.ns / each.calls) for each in times],
                "recorded_ns": [round(each.recorded_ns / each.calls) for each in times],
                "cost_ns": round(median((each.recorded_ns - each.ns) / each.calls for each in times)),
            }
        )
    return rows


def workers_headline(rows: list[dict[str, Any]]) -> str:
    """For docs/papers.md: what NVML says, and for how much of the time a kernel or a copy ran."""
    return "; ".join(
        f"{_processes(row['workers'])}: NVML {_percent_text(row['nvml_utilization'])}, "
        f"in use {100 * row['gpu_share_together']:.1f} %, by one of them {100 * _mean_share(row):.1f} %"
        for row in rows
    )


def _percent_text(percent: float | None) -> str:
    return "not available" if percent is None else f"{percent:.1f} %"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _mean_share(row: dict[str, Any]) -> float:
    return mean(each["gpu_ns"] / each["whole_ns"] for each in row["by_worker"])


def draw_workers(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars beside each other: NVML, all processes together, one of them."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    bars = {
        "NVML's utilisation": [
            math.nan if row["nvml_utilization"] is None else row["nvml_utilization"] for row in rows
        ],
        "GPU in use": [100 * row["gpu_share_together"] for row in rows],
        "by one process": [100 * _mean_share(row) for row in rows],
    }
    for at, (label, values) in enumerate(bars.items()):
        axes.bar([place + 0.27 * (at - 1) for place in range(len(rows))], values, 0.27, label=label)
    axes.set_xticks(range(len(rows)), [_processes(row["workers"]) for row in rows])
    axes.set_ylabel("% of the time")
    axes.legend(fontsize=8)
    figure.suptitle("GPU: what NVML calls utilisation, and true use", fontsize=10)
    figure.savefig(path, dpi=90)


def calls_headline(rows: list[dict[str, Any]]) -> str:
    """For docs/papers.md: what recording adds to a call."""
    return ", ".join(f"{row['call']} {row['cost_ns'] / 1e3:.2f} us" for row in rows)


def draw_calls(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of each call without and with recording."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for at, (label, key) in enumerate((("not recorded", "ns"), ("recorded", "recorded_ns"))):
        places = [place + 0.36 * (at - 0.5) for place in range(len(rows))]
        axes.bar(places, [median(row[key]) / 1e3 for row in rows], 0.36, label=label)
    axes.set_xticks(range(len(rows)), [row["call"] for row in rows], rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("us of CPU time")
    axes.legend()
    figure.suptitle("Calls of CUDA", fontsize=10)
    figure.savefig(path, dpi=90)


def main() -> int:
    """Command line; returns the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=("phases", "workers", "calls", "worker"))
    parser.add_argument(
        "--tasks", nargs="+", type=task_id, default=[task for task, _ in PHASE_CASES], help="of phases"
    )
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS), help="processes, of workers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("Nothing was measured: there is no GPU here.", file=sys.stderr)
        return 1
    if arguments.what == "worker":  # a process that "workers" starts
        worker()
        return 0
    measured: Iterator[list[dict[str, Any]]] = {
        "phases": lambda: ([phases(*case)] for case in PHASE_CASES if case[0] in arguments.tasks),
        "workers": lambda: ([workers(count)] for count in arguments.workers),
        "calls": lambda: iter([calls()]),
    }[arguments.what]()
    head = {**origin(), "gpu": torch.cuda.get_device_name(), "cores": os.cpu_count()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, rows = arguments.out / f"gpu_{arguments.what}.json", []
    for found in measured:
        rows += found
        print(json.dumps(found), flush=True)
        write_results(path, {"origin": head, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
