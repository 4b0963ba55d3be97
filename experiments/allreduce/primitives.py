"""All-reduce through shared memory against gloo, memcpy and one process that does all the work, interleaved in one run.

    python -m experiments.allreduce.primitives --output experiments/allreduce/results/primitives.json

Writes raw medians per repeat with the machine, versions and commit, and prints a table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.allreduce.members import CASES, Group, Run
from experiments.cores import not_idle_seconds
from experiments.scripts import command_line, origin, write_results

SIZES = (100_000, 440_000, 1_160_000, 6_000_000, 16_000_000, 64_000_000)
"""Bytes. The second to fourth are the 1.1e5, 2.9e5 and 1.5e6 float32 of the preprint's Table 7."""


MOST_OTHER_CORES = 0.15
"""A repeat during which something else used more is measured again, as long as patience lasts."""


@dataclass
class Row:
    """One case at one size: microseconds, each the median of one repeat's iterations."""

    members: int
    size_bytes: int
    case: str
    repeats_us: list[float]
    other_cores: list[float]
    """Mean number of cores that anything else used during each repeat of all cases."""

    def median_us(self) -> float:
        """Over the repeats."""
        return statistics.median(self.repeats_us)

    def spread_us(self) -> tuple[float, float]:
        """10th and 90th percentile over the repeats."""
        if len(self.repeats_us) < 2:
            return self.repeats_us[0], self.repeats_us[0]
        deciles = statistics.quantiles(self.repeats_us, n=10, method="inclusive")
        return deciles[0], deciles[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = _options(arguments)
    rows: list[Row] = []
    for world_size in options.members:
        found = measure(world_size, options.sizes, options.repeats, options.patience_s)
        rows += found
        others = [other for row in found for other in row.other_cores]
        print(table(found), f"\nanything else used up to {max(others):.2f} cores meanwhile\n", flush=True)
        if options.output:
            result = {
                "origin": origin(),
                "command": vars(options) | {"output": options.output.name},
                "unit": "microseconds",
                "rows": [asdict(row) for row in rows],
            }
            write_results(options.output, result)


def measure(world_size: int, sizes: Sequence[int], repeats: int, patience_s: float) -> list[Row]:
    """Rows of one group; repeats that something else disturbed are measured again for ``patience_s`` in all."""
    group = Group(world_size)
    rows: list[Row] = []
    patient_until = time.monotonic() + patience_s
    for size in sizes:
        of_size = {case: Row(world_size, size, case, [], []) for case in CASES}
        for case in CASES:
            group.measure(Run(case, size // 4, 3))
        for repeat in range(repeats):
            # Another order each time, so that no case always follows the same one.
            order = CASES[repeat % len(CASES) :] + CASES[: repeat % len(CASES)]
            times, other_cores = _measure_all(group, order, size)
            while other_cores > MOST_OTHER_CORES and time.monotonic() < patient_until:
                time.sleep(0.5)
                times, other_cores = _measure_all(group, order, size)
            for case, time_us in times.items():
                of_size[case].repeats_us.append(round(time_us, 1))
                of_size[case].other_cores.append(round(other_cores, 2))
        rows += of_size.values()
    group.close()
    return rows


def _measure_all(group: Group, cases: Sequence[str], size: int) -> tuple[dict[str, float], float]:
    """Median microseconds of each case, and the mean number of cores that anything else used."""
    busy_s, wall_s, own_s, times = not_idle_seconds(), time.monotonic(), 0.0, {}
    for case in cases:
        spans, cpu_s = group.measure(Run(case, size // 4, _iterations(size)))
        own_s += cpu_s
        times[case] = 1e6 * statistics.median(spans)
    wall_s = time.monotonic() - wall_s
    return times, max(0.0, not_idle_seconds() - busy_s - own_s) / wall_s


def table(rows: Sequence[Row]) -> str:
    """Median, 10th and 90th percentile in microseconds; how many times faster than gloo; shares of the limits."""
    medians = {(row.size_bytes, row.case): row.median_us() for row in rows}
    lines = [
        "| members | bytes | case | median us | p10 - p90 | gloo / case | memcpy / case | one process / case |"
    ]
    lines.append("|---" * 8 + "|")
    for row in rows:
        low, high = row.spread_us()
        ratios = [
            f"{medians[row.size_bytes, other] / row.median_us():.2f}"
            for other in ("gloo", "memcpy", "one process")
        ]
        lines.append(
            f"| {row.members} | {row.size_bytes:,} | {row.case} | {row.median_us():.0f} | {low:.0f} - {high:.0f} | "
            f"{' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def _iterations(size: int) -> int:
    """Per repeat: many of what is short."""
    return max(5, min(100, 20_000_000 // size))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__, prog="python -m experiments.allreduce.primitives")
    parser.add_argument("--members", type=int, nargs="+", default=[2, 3, 4], help="processes on this host")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the float32 tensor"
    )
    parser.add_argument("--repeats", type=int, default=9, help="times that all cases are run (default: 9)")
    parser.add_argument(
        "--patience-s",
        type=float,
        default=60.0,
        help="seconds per number of processes in which repeats that something else disturbed are measured again",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
