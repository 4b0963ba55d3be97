"""Every template, size and number of simulators on this machine, beside what the throughput model predicts.

    python -m experiments.mapping.run                  eleven minutes on two idle cores
    python -m experiments.mapping.run --record         and write rayagi/coordinator/model_validation.json

Writes results/<date>.json (raw lines, unit costs and origin), .md (table and validation) and .png.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from experiments.mapping.cases import KINDS, Case, cases, spec_of
from experiments.mapping.measure import measured
from experiments.mapping.plots import draw
from experiments.mapping.summary import Line, table, validation_of
from experiments.scripts import bullets, command_line, origin, task_id, write_results
from experiments.throughput.run import QUIET_SHARE, busy_share
from placement.inventory import local_machine
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.model_validation import RECORD
from rayagi.coordinator.profiling import unit_costs_of
from rayagi.coordinator.throughput_model import UnitCosts, predict

HERE = Path(__file__).parent
QUIET_S = 2.0
"""Longest wait for an idle machine before a measurement."""


def wait_until_quiet() -> float:
    """Wait until the machine is nearly idle. Returns the share of all cores that something used in the last second."""
    until = time.monotonic() + QUIET_S
    while True:
        busy = busy_share()
        if busy <= QUIET_SHARE or time.monotonic() > until:
            return busy


def costs_of(tasks: Sequence[str], kinds: Sequence[str], num_envs: int) -> dict[str, UnitCosts]:
    """Unit costs by group of cases; serving and ppo share a profile."""
    found: dict[str, UnitCosts] = {}
    for task in tasks:
        for kind in sorted(kinds, key=lambda kind: kind == "serving"):
            same = found.get(f"{task} ppo") if kind == "serving" else None
            wait_until_quiet()
            found[f"{task} {kind}"] = same or unit_costs_of(spec_of(task, kind, num_envs), local_machine())
            print(f"{task} {kind}: unit costs measured", flush=True)
    return found


def line_of(case: Case, repeat: int, costs: UnitCosts, seconds: float) -> Line:
    """Measure one case once, and predict it."""
    busy = wait_until_quiet()
    found, layout = measured(case, seconds)
    return Line(
        case=asdict(case),
        group=case.group,
        name=case.name,
        repeat=repeat,
        predicted=predict(costs, layout).steps_per_s,
        busy_before=busy,
        **found,  # type: ignore[arg-type]  # the fields of Line that are measured
    )


def write(stem: Path, header: dict[str, object], costs: dict[str, UnitCosts], lines: Sequence[Line]) -> None:
    """The three result files, of what there is so far."""
    content = {
        "origin": header,
        "costs": {group: asdict(each) for group, each in costs.items()},
        "rows": [asdict(line) for line in lines],
    }
    write_results(stem.with_suffix(".json"), content)
    text = validation_of(lines, header).text()
    stem.with_suffix(".md").write_text(f"# Templates\n\n{bullets(header)}\n\n{text}\n\n{table(lines)}\n")
    draw(lines, stem.with_suffix(".png"))


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", type=task_id, default=["Ant-v5", "HalfCheetah-v5"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case, starting not included")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--record", action="store_true", help="write the model's validation beside the model")
    given = parser.parse_args()
    header, stem = origin(), given.out / datetime.now(UTC).strftime("mapping_%Y-%m-%d_%H%M")
    lines: list[Line] = []
    with connected():
        costs = costs_of(given.tasks, given.kinds, min(given.num_envs))
        for repeat in range(given.repeats):
            for case in cases(given.tasks, given.kinds, given.num_envs):
                try:
                    lines.append(line_of(case, repeat, costs[case.group], given.seconds))
                except (RuntimeError, ConnectionError) as error:  # it is left out, and the others go on
                    print(f"{case.group} {case.name} failed: {error}", flush=True)
                else:
                    print(lines[-1].text(), flush=True)
            # What is cut short leaves what it has measured.
            write(stem, header, costs, lines)
    validation = validation_of(lines, header)
    print(f"{table(lines)}\n\n{validation.text()}")
    if given.record:
        write_results(RECORD, asdict(validation))


if __name__ == "__main__":
    main()
