"""GEAR's figures 5 and 6, and its selection times, on the cores at hand.

    python -m experiments.replay.figures throughput --reverb PYTHON --write   # figure 5: GB/s against clients and nodes
    python -m experiments.replay.figures batch --write                        # figure 6: GB/s against batch size
    python -m experiments.replay.figures selection --write                    # seconds of a selection against table size

Figure 5: clients are a data-parallel group. Every step all select the same rows of the whole table from the same seed, each
copies its part, and all wait for each other. A second node is a second shard whose process, and half of the clients, take
themselves to be on another host: they reach each other over TCP, on this machine. PYTHON: of an environment with dm-reverb
0.14.0, whose clients take batches of one server, without waiting for each other. 2 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from actors.replay import (
    Column,
    Fifo,
    Gatherer,
    Keys,
    Prioritized,
    ReplaySchema,
    ReplayShard,
    ReplayShards,
    ReplayStore,
    Selection,
    Subscription,
    TopK,
    Uniform,
    select,
    select_centralised,
)
from experiments.scripts import command_line, origin, run_program, write_results

HERE = Path(__file__).parent
STEPS, WIDTH = 64, 115
ROW_BYTES = STEPS * WIDTH * 4
"""Of a trajectory, as of workload W2."""
ROWS = 20_000
BATCH = 32
"""Rows of a client's part of a step."""
_FORK = multiprocessing.get_context("fork")
_WINDOW = [Subscription(column="data", length=STEPS)]


def serve(node: int, nodes: int, rows: int, pipe: Any) -> None:
    """A shard, each of whose rows holds its own index, until the pipe is closed."""
    schema = ReplaySchema((Column(name="data", dtype="float32", shape=(WIDTH,)),), STEPS)
    store = ReplayStore.create(schema, rows, shard=node, num_shards=nodes)
    for first in range(0, rows, 100):
        numbers = np.arange(first, min(first + 100, rows)) + store.base
        store.insert({"data": np.repeat(numbers.astype(np.float32), STEPS * WIDTH).reshape(-1, STEPS, WIDTH)})
    with ReplayShard(store, host_id=f"node {node}") as served:
        pipe.send(served.address)
        pipe.poll(None)


@contextmanager
def shards(nodes: int, rows: int) -> Iterator[list[str]]:
    """Addresses of the shards of a table with this many rows."""
    ends, processes = [], []
    for node in range(nodes):
        own, theirs = _FORK.Pipe()
        processes.append(_FORK.Process(target=serve, args=(node, nodes, rows // nodes, theirs), daemon=True))
        processes[-1].start()
        ends.append(own)
    try:
        yield [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def part_of(chosen: Selection, rank: int, batch: int) -> Selection:
    """One client's part of a selection for all."""
    at = slice(rank * batch, (rank + 1) * batch)
    keys = Keys(chosen.keys.indices[at], chosen.keys.generations[at])
    return Selection(keys, chosen.steps[at] * 0, chosen.probabilities[at], chosen.weights[at])


def client(
    rank: int, clients: int, nodes: int, addresses: Sequence[str], seconds: float, barrier: Any, pipe: Any
) -> None:
    """Select with all others, copy the own part, wait for them; report steps and seconds."""
    with ReplayShards(list(addresses), host_id=f"node {rank % nodes}") as table:
        gatherer, draw, end = Gatherer(table, _WINDOW, BATCH), 0, float("inf")

        def step() -> Selection:
            chosen = select(table, Uniform(), clients * BATCH, seed=0, draw=draw)
            gatherer(part_of(chosen, rank, BATCH))
            return chosen

        chosen = step()
        wanted = part_of(chosen, rank, BATCH).keys.indices
        whole = bool((gatherer.values["data"] == wanted[:, None, None]).all())
        pipe.send((whole, chosen.keys.indices.tobytes()))
        barrier.wait()
        begin = time.perf_counter()
        end = begin + seconds
        # All make the same number of steps: the barrier's last one tells whether another follows.
        while True:
            draw += 1
            step()
            if barrier.wait() == 0:
                _going.value = time.perf_counter() < end
            barrier.wait()
            if not _going.value:
                break
        pipe.send((draw, time.perf_counter() - begin))


_going = _FORK.Value("b", True)


def throughput(clients: int, nodes: int, seconds: float, rows: int) -> float:
    """GB/s of all clients together.

    Raises:
        RuntimeError: clients chose different rows, or a row was not whole.
    """
    _going.value = True
    with shards(nodes, rows) as addresses:
        barrier, pipes = _FORK.Barrier(clients), []
        for rank in range(clients):
            own, theirs = _FORK.Pipe()
            given = (rank, clients, nodes, addresses, seconds, barrier, theirs)
            _FORK.Process(target=client, args=given, daemon=True).start()
            pipes.append(own)
        first = [pipe.recv() for pipe in pipes]
        if not all(whole for whole, _ in first) or len({chosen for _, chosen in first}) != 1:
            raise RuntimeError("clients chose different rows, or a row was not whole")
        steps, lasted = max(pipe.recv() for pipe in pipes)
    return float(steps * clients * BATCH * ROW_BYTES / lasted / 1e9)


def reverb(python: str, clients: int, seconds: float, rows: int) -> float:
    """GB/s of Reverb's clients together."""
    command = [python, str(HERE / "reverb_clients.py"), "--clients", str(clients), "--seconds", str(seconds)]
    command += ["--rows", str(rows), "--steps", str(STEPS), "--width", str(WIDTH), "--batch", str(BATCH)]
    ran = run_program(command, stdout=subprocess.PIPE)
    return float(json.loads(ran.stdout.splitlines()[-1])["bytes_per_s"] / 1e9)


def measure_throughput(given: argparse.Namespace) -> dict[str, Any]:
    """Figure 5."""
    variants: dict[str, Callable[[int], float]] = {
        "one node": lambda clients: throughput(clients, 1, given.seconds, given.rows),
        "two nodes": lambda clients: throughput(clients, 2, given.seconds, given.rows),
    }
    if given.reverb:
        variants["Reverb"] = lambda clients: reverb(given.reverb, clients, given.seconds, given.rows)
    found: dict[str, dict[int, list[float]]] = {name: {} for name in variants}
    for _ in range(given.repeats):
        for clients in given.clients:
            for name, variant in variants.items():
                if name != "two nodes" or clients % 2 == 0:
                    found[name].setdefault(clients, []).append(variant(clients))
    return {"x": "clients", "y": "GB/s of all clients", "lines": found}


def measure_batch(given: argparse.Namespace) -> dict[str, Any]:
    """Figure 6: one client beside its shard, one on another node, and memcpy of as many bytes."""
    found: dict[str, dict[int, list[float]]] = {"beside the shard": {}, "over TCP": {}, "memcpy": {}}
    source = np.ones(10**9, np.uint8)
    with shards(1, given.rows) as addresses:
        for _ in range(given.repeats):
            for batch in given.batches:
                size = batch * ROW_BYTES
                for name, host in (("beside the shard", "node 0"), ("over TCP", "node 1")):
                    with ReplayShards(addresses, host_id=host) as table:
                        found[name].setdefault(batch, []).append(
                            size / _collecting(table, batch, given.seconds)
                        )
                target = np.zeros(size, np.uint8)
                copies = iter(range(10**9))

                def copy(
                    target: np.ndarray = target, size: int = size, copies: Iterator[int] = copies
                ) -> None:
                    at = next(copies) * size % (source.size - size)
                    np.copyto(target, source[at : at + size])

                found["memcpy"].setdefault(batch, []).append(size / _per_call(copy, given.seconds))
    lines = {
        name: {b: [v / 1e9 for v in values] for b, values in line.items()} for name, line in found.items()
    }
    return {"x": "rows of a batch", "y": "GB/s of one client", "lines": lines}


def _collecting(table: ReplayShards, batch: int, seconds: float) -> float:
    gatherer, draws = Gatherer(table, _WINDOW, batch), iter(range(10**9))

    def step() -> None:
        gatherer(part_of(select(table, Uniform(), batch, seed=1, draw=next(draws)), 0, batch))

    return _per_call(step, seconds)


def _per_call(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one call, after one that does not count."""
    call()
    begin, count = time.perf_counter(), 0
    while (lasted := time.perf_counter() - begin) < seconds:
        call()
        count += 1
    return lasted / count


def measure_selection(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a selection of 1024 rows, of one and four shards in this process."""
    selectors = {"uniform": Uniform(), "prioritised": Prioritized(0.6), "top-k": TopK(), "FIFO": Fifo()}
    found: dict[str, dict[int, list[float]]] = {}
    schema = ReplaySchema((Column(name="x", dtype="float32"),))
    for size in given.sizes:
        for parts in (1, 4):
            stores = [
                ReplayStore.create(
                    schema, size // parts, shard=shard, num_shards=parts, selectors=(Prioritized(0.6),)
                )
                for shard in range(parts)
            ]
            rng = np.random.default_rng(0)
            for store in stores:
                for first in range(0, size // parts, 10**5):
                    count = min(10**5, size // parts - first)
                    store.insert({"x": np.zeros(count, np.float32)}, priorities=rng.random(count))
            for name, selector in selectors.items():
                for how, function in (("", select), (", centralised", select_centralised)):
                    draws = iter(range(10**9))

                    def choose(
                        function: Any = function,
                        selector: Any = selector,
                        draws: Iterator[int] = draws,
                        stores: list[ReplayStore] = stores,
                    ) -> None:
                        function(stores, selector, 1024, seed=0, draw=next(draws))

                    times = [_per_call(choose, given.seconds / 4) for _ in range(given.repeats)]
                    found.setdefault(f"{name}, {parts} shard{'s' * (parts > 1)}{how}", {})[size] = times
            del stores
    return {"x": "rows of the table", "y": "seconds of a selection of 1024", "lines": found}


MEASURES = {"throughput": measure_throughput, "batch": measure_batch, "selection": measure_selection}


def table(report: dict[str, Any]) -> str:
    """Markdown: a row a line, median [lowest - highest]."""
    xs = sorted({x for line in report["lines"].values() for x in line})
    rows = [f"| {report['x']} | " + " | ".join(f"{x:,}" for x in xs) + " |", "|---|" + "---|" * len(xs)]
    for name, line in report["lines"].items():
        cells = [
            f"{median(line[x]):.3g} [{min(line[x]):.3g} - {max(line[x]):.3g}]" if x in line else ""
            for x in xs
        ]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def draw(report: dict[str, Any], path: Path) -> None:
    """Medians with their ranges."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, line in report["lines"].items():
        xs = sorted(line)
        middle = [median(line[x]) for x in xs]
        low = [m - min(line[x]) for m, x in zip(middle, xs, strict=True)]
        high = [max(line[x]) - m for m, x in zip(middle, xs, strict=True)]
        axes.errorbar(xs, middle, yerr=[low, high], marker="o", capsize=3, label=name)
    axes.set_xscale("log", base=2 if max(xs) < 10**4 else 10)
    if report["y"].startswith("seconds"):
        axes.set_yscale("log")
    axes.set_xlabel(report["x"])
    axes.set_ylabel(report["y"])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.suptitle(f"{os.cpu_count()} cores")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("figure", choices=tuple(MEASURES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    parser.add_argument("--rows", type=int, default=ROWS, help="of the table of figures 5 and 6")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--reverb", metavar="PYTHON", help="of an environment with dm-reverb 0.14.0")
    parser.add_argument("--write", action="store_true", help="into the folder of --out")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    report = {"origin": origin(), **MEASURES[given.figure](given)}
    print(table(report))
    if given.write:
        path = given.out / f"figure_{given.figure}_{datetime.now(UTC):%Y-%m-%d_%H%M}.json"
        write_results(path, report)
        draw(report, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
