"""What huge pages are worth: the same store in huge pages, in small ones, and NumPy's loop, in turns.

    taskset -c 1 python -m experiments.replay.huge_pages --scale 0.3      # 1 GB, half a minute; one core: one thread

Turns are short, so that what else the machine does strikes all alike. A system whose ``shmem_enabled`` is ``always`` gives
both stores huge pages.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import numpy as np

from actors.replay import ReplayStore, Uniform, memory
from experiments.replay.bench import rate
from experiments.replay.workloads import ANT, TRANSITION, filled, ours, random_rows, take

_WORKLOADS = {"W1": (TRANSITION, 10**6, 1, (256, 4096)), "W2": (ANT, 20_000, 64, (32, 256))}
"""Columns, rows, timesteps, and rows of a batch."""


def in_small_pages(plain: dict[str, np.ndarray]) -> ReplayStore:
    """As without MADV_COLLAPSE."""
    with patch.object(memory, "_fill_with_huge_pages"):
        return filled(plain, ())


def main() -> None:
    """Measure and print: medians of the turns' ratios, and in brackets their quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of what is stored")
    parser.add_argument("--seconds", type=float, default=0.05, help="of one turn")
    parser.add_argument("--turns", type=int, default=25)
    given = parser.parse_args()
    print(
        "| workload | rows a call | small pages / loop | huge pages / loop | huge / small |\n|---|---|---|---|---|"
    )
    for name, (widths, rows, steps, batches) in _WORKLOADS.items():
        plain = random_rows(widths, int(rows * given.scale), steps)
        small, huge = in_small_pages(plain), filled(plain, ())
        for batch in batches:
            length = None if steps == 1 else steps
            variants = [
                take(plain, batch)(0),
                *(ours(store, Uniform(), batch, length)(0) for store in (small, huge)),
            ]
            turns = [[rate(step, given.seconds).per_cpu_s for step in variants] for _ in range(given.turns)]
            loop, before, after = np.array(turns).T
            cells = [
                "{1:.2f} ({0:.2f} - {2:.2f})".format(*np.quantile(ratios, (0.25, 0.5, 0.75)))
                for ratios in (before / loop, after / loop, after / before)
            ]
            print(f"| {name} | {batch} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
