"""What synchronisation costs in training (Ant-v5, 2 GMIs): the reductions themselves, apart from waiting for the other GMI.

    python -m experiments.allreduce.in_training --seconds 30 --repeats 3

Every collective of every GMI is timestamped on the host's clock: from the arrival of the last member to the end of the
last is what it costs; before, the others wait for one that is still computing. Writes results/in_training_*.json with the
machine, versions and commit, and prints a table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from experiments.allreduce.timestamps import Split, TimestampedFactory, split
from experiments.scripts import command_line, origin, write_results
from experiments.throughput.settings import run_spec
from rayagi.algorithms.factory import training_factory
from rayagi.config.presets import preset
from rayagi.config.spec import RunSpec
from rayagi.coordinator.session import Session

HERE = Path(__file__).parent
NUM_GMIS = 2
GOAL_SHARE = 0.02
"""Of the iteration."""
WARM_UP_ITERATIONS, ITERATIONS_PER_REQUEST = 3, 4


@dataclass(frozen=True, slots=True)
class Row:
    """One run of one case."""

    case: str
    repeat: int
    steps_per_s: float
    split: Split


def cases() -> dict[str, RunSpec]:
    """The peers' settings and the task's preset, through shared memory and through Gloo."""
    peers = run_spec(NUM_GMIS, threads_per_gmi=1)
    task = preset("Ant-v5")
    task = replace(task, gmi=replace(task.gmi, backend="cpu", num_gmis=NUM_GMIS, threads_per_gmi=1))
    found = {}
    for name, spec in (("peers' settings", peers), ("preset", task)):
        found[name] = spec
        found[f"{name}, gloo"] = replace(spec, gmi=replace(spec.gmi, transport="gloo"))
    return found


def measure(name: str, spec: RunSpec, repeat: int, seconds: float) -> Row:
    """Train for ``seconds`` after a few iterations that do not count."""
    with Session(spec, factory=TimestampedFactory(training_factory(spec))) as session:
        session.train(WARM_UP_ITERATIONS)
        session.state_dict()  # what was logged until now does not count
        steps, began = 0.0, time.monotonic()
        while time.monotonic() - began < seconds:
            results = session.train(ITERATIONS_PER_REQUEST)
            steps += sum(result.metrics["env_steps"] for result in results)
        elapsed_s = time.monotonic() - began
        logs = session.state_dict()["local"]
    return Row(name, repeat, steps / elapsed_s, split(logs))


def table(rows: Sequence[Row]) -> str:
    """Medians over the repeats; shares in percent of the iteration, with their range."""
    lines = [
        "| case | iteration ms | collectives | gradients, us median (p90) | reducing % | last member's % | waiting % | "
        "all in collectives % | steps/s |",
        "|---" * 9 + "|",
    ]
    for name in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == name]
        splits = [row.split for row in own]
        cells = [
            name,
            f"{1e3 * statistics.median(s.iteration_s for s in splits):.0f}",
            f"{splits[0].operations:.0f}",
            f"{statistics.median(s.reducing_us for s in splits):.0f} "
            f"({statistics.median(s.reducing_p90_us for s in splits):.0f})",
            _percent([s.reducing_share for s in splits]),
            _percent([s.last_member_share for s in splits]),
            _percent([s.waiting_share for s in splits]),
            _percent([s.in_collectives_share for s in splits]),
            f"{statistics.median(row.steps_per_s for row in own):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * statistics.median(shares):.2f} ({100 * min(shares):.2f} - {100 * max(shares):.2f})"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training per run (default: 30)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each case, in turns with the others (default: 3)"
    )
    parser.add_argument("--remark", default="", help="kept with the results, e.g. what else ran meanwhile")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result file")
    given = parser.parse_args()
    rows = []
    for repeat in range(given.repeats):
        for name, spec in cases().items():
            rows.append(measure(name, spec, repeat, given.seconds))
            print(repeat, name, f"reducing {rows[-1].split.reducing_share:.2%} of the iteration", flush=True)
    result = {
        "origin": origin(),
        "remark": given.remark,
        "seconds_per_run": given.seconds,
        "goal_share": GOAL_SHARE,
        "rows": [asdict(row) for row in rows],
    }
    path = given.out / f"in_training_{datetime.now(UTC):%Y-%m-%d_%H%M}.json"
    write_results(path, result)
    print(f"{table(rows)}\nwritten: {path}")


if __name__ == "__main__":
    main()
