"""Table 8: uni-channel against multi-channel, in predictions and training samples per second.

    python -m experiments.channels_table8.run --repeats 5 --seconds 4

Ways run one at a time, interleaved over the repeats. Writes results/<date>.json (all runs and origin) and results/<date>.md.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.channels_table8.members import measure_compute, run_agent, run_trainer
from experiments.channels_table8.shapes import TASKS, Size
from experiments.channels_table8.ways import WAYS, grouped
from experiments.scripts import bullets, command_line, origin, write_results

HERE = Path(__file__).parent
LIMIT_S = 120.0
COMPUTE_S = 1.0
"""For measuring what a rollout takes without any transfer."""
SMALL, LONG, LARGE = (16, 64), (32, 64), (32, 256)
"""Steps and environments of a rollout."""
CASES = (
    (SMALL, (2, 1), "A3C"),
    (LONG, (2, 1), "A3C"),
    (LARGE, (2, 1), "A3C"),
    (LARGE, (4, 2), "A3C"),
    (LARGE, (2, 1), "reading"),
)
"""Rollout, agents and trainers, and what trainers do."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["experiments.channels_table8.members", "torch._dynamo"]
)  # optimisers load it


def run_once(
    size: Size, way: str, agents: int, trainers: int, learn: bool, seconds: float
) -> dict[str, float]:
    """Of all together: predictions and samples per second, and samples per CPU second of trainers and agents."""
    counts, stop = _context.Array("d", 2 * agents, lock=False), _context.Event()
    pipes = [_context.Pipe() for _ in range(trainers)]
    served = [list(range(trainer, agents, trainers)) for trainer in range(trainers)]
    window = (seconds / 4, seconds)
    processes: list[Any] = [
        _context.Process(
            target=run_trainer, args=(size, way, learn, window, theirs, counts, producers), daemon=True
        )
        for (_, theirs), producers in zip(pipes, served, strict=True)
    ]
    for process in processes:
        process.start()
    endpoints = [receive(ours) for ours, _ in pipes]
    for agent in range(agents):
        where = endpoints[agent % trainers]
        process = _context.Process(
            target=run_agent, args=(size, way, agent, where, counts, stop), daemon=True
        )
        process.start()
        processes.append(process)
    try:
        answers = [receive(ours) for ours, _ in pipes]
    finally:
        stop.set()
        for process in processes:
            process.kill()
            process.join()
    total = {key: sum(answer[key] for answer in answers) for key in answers[0]}
    return {"pps": total["pps"], "ttp": total["ttp"], "per_cpu_s": total["samples"] / total["cpu_s"]}


def compute_s(size: Size, learn: bool) -> float:
    """What a rollout takes without any transfer, while every core does the same: clocks and caches are shared then, too."""
    cores = len(os.sched_getaffinity(0))
    with _context.Pool(cores) as pool:
        return statistics.median(pool.starmap(measure_compute, [(size, learn, COMPUTE_S)] * cores))


def receive(connection: Any) -> Any:
    """What a trainer says.

    Raises:
        TimeoutError: it says nothing.
    """
    if not connection.poll(LIMIT_S):
        raise TimeoutError(f"a trainer said nothing for {LIMIT_S:.0f} s")
    return connection.recv()


def summarise(rows: list[dict[str, Any]]) -> str:
    """Markdown: medians of each way, the multi-channel's gain within each repeat, with its range, and the bound of any gain.

    The bound is of samples per CPU second: those of agents and trainers that move nothing, over the way's.
    """
    measures = {"pps": "PPS", "ttp": "TTP", "per_cpu_s": "samples per CPU s"}
    names = [f"{name} | multi / way | lowest - highest" for name in measures.values()]
    head = f"task | T x N | agents, trainers | work | way | {' | '.join(names)} | nothing moved / way"
    lines = [f"| {head} |", f"|{'---|' * 15}"]
    cases: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        case = (
            row["task"],
            f"{row['steps']} x {row['envs']}",
            f"{row['agents']}, {row['trainers']}",
            row["work"],
        )
        cases.setdefault(case, {}).setdefault(row["way"], {})[row["repeat"]] = row
    for case, ways in cases.items():
        for way, runs in ways.items():
            cells = [*case, way]
            for key in measures:
                gains = [ways["multi"][repeat][key] / run[key] for repeat, run in runs.items()]
                median = statistics.median(run[key] for run in runs.values())
                spread = f"{min(gains):.2f} - {max(gains):.2f}"
                cells += [f"{median:,.0f}", f"{statistics.median(gains):.2f}", spread]
            cells.append(f"{statistics.median(run['bound'] for run in runs.values()):.2f}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument(
        "--onto", type=Path, help="a .json of an earlier part, whose repeats are gone on with"
    )
    given = parser.parse_args()
    cases = [(name, Size(task, *shape), *rest) for name, task in TASKS.items() for shape, *rest in CASES]
    rows: list[dict[str, Any]] = json.loads(given.onto.read_text())["rows"] if given.onto else []
    first = 1 + max((row["repeat"] for row in rows), default=-1)
    for repeat in range(first, first + given.repeats):
        compute = {(name, size.steps, work): compute_s(size, work == "A3C") for name, size, _, work in cases}
        for name, size, (agents, trainers), work in cases:
            for turn in range(len(WAYS)):
                way = WAYS[(repeat + turn) % len(WAYS)]
                found = run_once(size, way, agents, trainers, work == "A3C", given.seconds)
                row = {
                    "task": name, "steps": size.steps, "envs": size.envs, "agents": agents, "trainers": trainers,
                    "work": work, "way": way, "repeat": repeat, "load": os.getloadavg()[0], **found,
                    "bound": size.steps * size.envs / compute[name, size.steps, work] / found["per_cpu_s"],
                }  # fmt: skip
                rows.append(row)
                print(*row.values(), flush=True)
    header = origin()
    name = given.onto.stem if given.onto else datetime.now(UTC).strftime("table8_%Y-%m-%d_%H%M")
    write_results(given.out / f"{name}.json", {"origin": header, "rows": rows})
    plans = "\n\n".join(f"{name}:\n\n```\n{grouped(Size(task, *SMALL))}\n```" for name, task in TASKS.items())
    table = summarise(rows)
    (given.out / f"{name}.md").write_text(
        f"# Table 8 on this machine\n\n{bullets(header)}\n\n{table}\n\n{plans}\n"
    )
    print(table)


if __name__ == "__main__":
    main()
