"""Speed of replay stores beside plain loops and memcpy: all variants of a workload in turns.

    python -m experiments.replay.bench --repeats 5            # about 8 minutes and 8 GB; W5 needs 2 GB more for 1e8 weights
    pip install cpprb==11.0.0 torchrl==0.14.1             # peers: further variants, where they are installed
    python -m experiments.replay.bench --only W1 --scale 0.1 --seconds 0.1 --repeats 2

Prints the table of the README, and writes it with every repeat to results/<date>.json if --write is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import chisquare

from experiments.cores import not_idle_seconds
from experiments.replay.workloads import Case, Consumer, WeightTree, cases
from experiments.scripts import origin, spread, write_results


class Rate(NamedTuple):
    """Calls per second, and per second of this process's CPU time: of all its threads, but not of other processes."""

    per_s: float
    per_cpu_s: float


def rate(step: Callable[[], object], seconds: float) -> Rate:
    """Call it again and again."""
    begin, used, count = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - begin) < seconds:
        step()
        count += 1
    return Rate(count / passed, count / (time.process_time() - used))


def together(consumers: Sequence[Consumer], seconds: float) -> list[Rate]:
    """Each in a forked process, at the same time."""
    begin_at, pipes = time.monotonic() + 2.0, []  # after all have attached
    for seed, consumer in enumerate(consumers):
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                step = consumer(seed)
                step()
                time.sleep(max(0.0, begin_at - time.monotonic()))
                os.write(write, json.dumps(rate(step, seconds)).encode())
            finally:
                os._exit(0)
        os.close(write)
        pipes.append(read)
    found = []
    for read in pipes:
        with os.fdopen(read) as pipe:
            found.append(Rate(*json.loads(pipe.read())))
        os.wait()
    return found


class Memcpy:
    """One thread copies from a cold source to a warm target."""

    def __init__(self) -> None:
        self.source = np.ones(10**9, np.uint8)

    def bytes_per_s(self, size: int, seconds: float) -> float:
        """Speed of copies of this size."""
        target, at = np.zeros(size, np.uint8), [0]

        def step() -> None:
            np.copyto(target, self.source[at[0] : at[0] + size])
            at[0] = at[0] + size if at[0] + 2 * size <= self.source.size else 0

        return rate(step, seconds).per_cpu_s * size


def measure(case: Case, consumers: int, memcpy: Memcpy, seconds: float, repeats: int) -> dict[str, object]:
    """Rows per second of each variant, in turns: of all consumers, and of one per second of its CPU time."""
    # torch's threads do not survive the fork of a consumer.
    variants = {name: each for name, each in case.variants.items() if consumers == 1 or name != "torchrl"}
    rows: dict[str, list[float]] = {name: [] for name in variants}
    per_cpu: dict[str, list[float]] = {name: [] for name in variants}
    copies, busy = [], []
    for _ in range(repeats):
        copies.append(memcpy.bytes_per_s(case.batch * case.row_bytes, seconds / 4))
        for name, consumer in variants.items():
            begun, used = time.monotonic(), not_idle_seconds()
            if consumers == 1 and case.beside is None:
                step = consumer(0)
                step()
                found = [rate(step, seconds)]
            else:
                beside = [] if case.beside is None else [case.beside]
                found = together([consumer] * consumers + beside, seconds)[:consumers]
            busy.append((not_idle_seconds() - used) / (time.monotonic() - begun))
            rows[name].append(sum(one.per_s for one in found) * case.batch)
            per_cpu[name].append(statistics.mean(one.per_cpu_s for one in found) * case.batch)
    return {
        "case": case.name,
        "batch": case.batch,
        "consumers": consumers,
        "row_bytes": case.row_bytes,
        "rows_per_s": rows,
        "rows_per_cpu_s": per_cpu,
        "memcpy_bytes_per_s": copies,
        "cores_in_use": statistics.median(busy),
    }


def line(found: dict[str, object]) -> str:
    """A row of the table. Ratios are of rates per CPU second: median (lowest - highest)."""
    peer = "cpprb, shared" if found["consumers"] == 2 or "W6" in str(found["case"]) else "cpprb"
    peer = "torchrl" if found["case"] == "W4" else peer
    names = ("replay", "loop", peer)
    replay, loop, _ = (found["rows_per_s"].get(name, []) for name in names)  # type: ignore[attr-defined]
    own, other, beside = (found["rows_per_cpu_s"].get(name, []) for name in names)  # type: ignore[attr-defined]
    copies: list[float] = found["memcpy_bytes_per_s"]  # type: ignore[assignment]
    to_memcpy = [r * found["row_bytes"] / c for r, c in zip(own, copies, strict=True)]
    to_loop, to_peer = (
        [r / o for r, o in zip(own, each, strict=True)] if each else [] for each in (other, beside)
    )
    cells = [
        *(str(found[name]) for name in ("case", "batch", "consumers")),
        f"{statistics.median(replay):,.0f}",
        f"{statistics.median(loop):,.0f}" if loop else "",
        spread(to_loop),
        f"{statistics.median(to_memcpy):.2f}",
        spread(to_peer),
        f"{found['cores_in_use']:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def selection_alone(size: int, repeats: int) -> dict[str, object]:
    """W5: a million draws and a hundred thousand updates of a tree; chi-squared over a thousand groups of indices."""
    rng = np.random.default_rng(0)
    weights = 1 - rng.random(size)
    begin = time.perf_counter()
    tree = WeightTree(weights)
    found: dict[str, object] = {"size": size, "build_s": time.perf_counter() - begin}
    draws, updates, loops = [], [], []
    for _ in range(repeats):
        u = rng.random(10**6)
        begin = time.perf_counter()
        chosen = tree.draw(u)
        draws.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        prefix = np.cumsum(weights)
        middle = time.perf_counter()
        np.searchsorted(prefix, np.sort(u * prefix[-1]))
        loops.append((time.perf_counter() - middle, middle - begin))
        indices, values = rng.integers(0, size, 10**5), 1 - rng.random(10**5)
        before = weights[indices]
        begin = time.perf_counter()
        tree.update(indices, values)
        updates.append(time.perf_counter() - begin)
        tree.update(indices, before)
    groups = 1000
    counts = np.bincount(chosen // -(-size // groups), minlength=groups)
    expected = np.add.reduceat(weights, np.arange(0, size, -(-size // groups)))
    odd = float(np.mean(chosen % 2))
    p_value = float(chisquare(counts, expected / expected.sum() * len(chosen)).pvalue)
    return {**found, "draw_s": draws, "update_s": updates, "loop_s": loops, "p_value": p_value, "odd": odd}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=["W1", "W1p", "W1t", "W2", "W3", "W4", "W5", "W6"])
    parser.add_argument("--scale", type=float, default=1.0, help="of what is stored")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into results/")
    given = parser.parse_args()
    results: dict[str, object] = {"origin": origin(), "cases": [], "selection": []}
    memcpy = Memcpy()
    print("Ratios are of rates per CPU second, which other processes of the machine disturb less.\n")
    print(
        "| workload | rows a call | consumers | replay, rows/s | loop, rows/s | / loop | / memcpy | / peer | cores in use |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases(given.scale, lambda name: name in given.only):
        if case.name.split()[0] not in given.only:
            continue
        for consumers in (1, 2) if case.beside is None else (int(case.name[-1]),):
            found = measure(case, consumers, memcpy, given.seconds, given.repeats)
            results["cases"].append(found)  # type: ignore[attr-defined]
            print(line(found), flush=True)
    for size in (10**7, 10**8) if "W5" in given.only else ():
        found = selection_alone(int(size * given.scale), given.repeats)
        results["selection"].append(found)  # type: ignore[attr-defined]
        draw, update = (statistics.median(found[name]) for name in ("draw_s", "update_s"))  # type: ignore[type-var]
        sorted_draw, prefix = np.median(found["loop_s"], axis=0)  # type: ignore[arg-type]
        print(
            f"W5 of {found['size']:,}: {1 / draw:.1f} M draws/s, {1e3 * update:.1f} ms for 1e5 updates; sorted draws and "
            f"cumsum {1 / sorted_draw:.1f} M/s, {1e3 * prefix:.0f} ms; p = {found['p_value']:.3f}, odd {found['odd']:.4f}"
        )
    if given.write:
        path = Path(__file__).parent / "results" / f"replay_{datetime.now(UTC):%Y-%m-%d_%H%M}.json"
        write_results(path, results)


if __name__ == "__main__":
    main()
