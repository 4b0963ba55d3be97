"""Batches of a replay on a GPU: every way of ``rayagi.device_replay``, against the host's gather and the bus.

    python -m experiments.replay.on_gpu --out DIR

Cases are measured in turns. "bus" is a copy of as many bytes from page-locked memory, which no way but the mirror can beat.
Needs a GPU, and says so where there is none. Writes ``on_gpu.json`` after each batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.replay import Gatherer, ReplayStore, Subscription, Uniform, select
from experiments.replay.workloads import ANT, LONG, TRANSITION, filled, random_rows
from experiments.scripts import command_line, origin, write_results
from rayagi.device_replay.buffers import UnavailableError
from rayagi.device_replay.choice import WAYS

RESULTS = Path(__file__).parent / "results"
DEVICE = torch.device("cuda", 0)
SELECTIONS = 16


@dataclass(frozen=True)
class Work:
    """Rows of a store, and batches of them."""

    name: str
    widths: dict[str, int]
    rows: int
    steps: int
    batches: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Of a row of a batch."""
        return 4 * self.steps * sum(self.widths.values())


WORKS = (
    Work("W1", TRANSITION, 1_000_000, 1, (256, 4096, 65536)),
    Work("W2", ANT, 20_000, 64, (32, 256, 2048)),
    Work("W3", LONG, 4_000, 1000, (32, 256)),
)
"""As in ``experiments.replay.bench``: transitions, short trajectories, long ones."""


def variants(work: Work, store: ReplayStore, batch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Functions that bring one batch: the host's gather, a copy of as many bytes, and each way that is available."""
    wanted = [Subscription(column=name, length=work.steps) for name in work.widths]
    chosen = [select(store, Uniform(), batch, seed=0, draw=draw) for draw in range(SELECTIONS)]

    def turns(gatherer: Callable[[Any], object]) -> Callable[[], object]:
        at = iter(range(10**12))
        return lambda: gatherer(chosen[next(at) % SELECTIONS])

    yield "host", turns(Gatherer(store, wanted, batch))
    size = batch * work.row_bytes
    here = torch.ones(size, dtype=torch.uint8).pin_memory()
    there = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    yield "bus", lambda: there.copy_(here, non_blocking=True)
    for name, make in WAYS.items():
        try:
            gatherer = make(store, wanted, batch, DEVICE)
        except UnavailableError as error:
            print(f"{work.name} of {batch}: {name} is left out: {error}", flush=True)
            continue
        yield name, turns(gatherer)


def seconds_each(step: Callable[[], object], seconds: float) -> float:
    """Seconds of a batch, when the device has all of them."""
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def measure(work: Work, store: ReplayStore, batch: int, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """All variants in turns; the mirror has the rows of these batches, as in a long run."""
    steps = dict(variants(work, store, batch))
    for step in steps.values():
        for _ in range(SELECTIONS):
            step()
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            found[name].append(seconds_each(step, seconds))
    return [
        {
            "workload": work.name,
            "batch": batch,
            "variant": name,
            "rows_per_s": [round(batch / each) for each in times],
            "gb_per_s": round(batch * work.row_bytes / median(times) / 1e9, 3),
            "of_bus": round(median(bus / each for bus, each in zip(found["bus"], times, strict=True)), 4),
        }
        for name, times in found.items()
    ]


def main() -> int:
    """Command line; returns the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the stores")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("Nothing was measured: there is no GPU here.", file=sys.stderr)
        return 1
    head = {**origin(), "gpu": torch.cuda.get_device_name()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, rows = arguments.out / "on_gpu.json", []
    for work in WORKS:
        store = filled(random_rows(work.widths, int(work.rows * arguments.scale), work.steps), ())
        for batch in work.batches:
            found = measure(work, store, batch, arguments.seconds, arguments.repeats)
            print(json.dumps(found), flush=True)
            rows += found
            write_results(path, {"origin": head, "rows": rows})
        del store
    return 0


if __name__ == "__main__":
    sys.exit(main())
