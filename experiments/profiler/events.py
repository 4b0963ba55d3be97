"""How long evaluating a profile of many events takes (RL-Scope, section 3.3: the overlap of all categories).

    python -m experiments.profiler.events --events 10_000_000 --repeats 5

Writes a synthetic profile of four processes with two threads each into a temporary folder. Each thread repeats the loop
of a trainer: simulate, infer and backpropagate, each an operation with native calls of 1 to 3 us, every fourth with a
call within it; a loop has 450 events, and an iteration 100 loops, then 1. Each evaluation runs in a process of its own.
Writes ``results/events.json``.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.scripts import command_line, origin, write_results
from rayagi.profiler.layout import HEADER, MAGIC, NAMES, PROCESS, PROFILE, RECORD, VERSION, Category
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.trace import EVENT, read_profile

RESULTS = Path(__file__).parent / "results"
PROCESSES, THREADS, CALLS = 4, 2, 120
"""Native calls of an operation."""
OPERATIONS = ("simulate", "infer", "backpropagate")
KINDS = (Category.SIMULATOR, Category.BACKEND, Category.BACKEND)
LOOPS = (100, 1)
"""Of an iteration."""
SEED = 1


def operation_events(random: np.random.Generator, kind: Category, name: int) -> NDArray[np.void]:
    """One operation from time 0: its native calls in the order in which they end, after the operation itself."""
    lengths, gaps = random.integers(1000, 3000, CALLS), random.integers(200, 1500, CALLS)
    ends = np.cumsum(lengths + gaps)
    calls = np.zeros(CALLS, EVENT)
    calls["start"], calls["end"], calls["category"] = ends - lengths, ends, kind
    inner = calls[::4].copy()
    inner["start"] += 200
    inner["end"] -= 200
    inner["category"], inner["depth"] = Category.COMMUNICATION, 1
    scope = np.zeros(1, EVENT)
    scope["end"], scope["name"], scope["category"] = ends[-1] + 500, name, Category.OPERATION
    return np.concatenate([scope, np.insert(calls, np.arange(0, CALLS, 4), inner)])


def thread_events(random: np.random.Generator, count: int, start: int, loops: int) -> NDArray[np.void]:
    """About ``count`` events of a thread that starts at a time, with so many loops an iteration."""
    loop, at = [], 0
    for name, kind in enumerate(KINDS, start=1):
        events = operation_events(random, kind, name)
        events["start"] += at
        events["end"] += at
        at = int(events["end"].max()) + 700
        loop.append(events)
    once = np.concatenate(loop)
    turns = max(1, count // len(once))
    events = np.tile(once, turns)
    shift = start + np.repeat(np.arange(turns), len(once)) * at
    events["start"] += shift
    events["end"] += shift
    iterations = np.zeros(-(-turns // loops), EVENT)
    iterations["start"] = start + np.arange(len(iterations)) * loops * at
    iterations["end"] = np.minimum(iterations["start"] + loops * at, start + turns * at)
    iterations["category"], iterations["flags"] = Category.ITERATION, np.arange(len(iterations))
    life = np.zeros(1, EVENT)
    life["start"], life["end"], life["category"] = start, start + turns * at, Category.THREAD
    return np.concatenate([life, iterations, events])


def write_profile(folder: Path, count: int, loops: int) -> int:
    """A profile of about ``count`` events; returns how many."""
    folder.mkdir()
    about = {"version": VERSION, "command": ["synthetic"], "start_unix_ns": 0, "intercepted": {}}
    (folder / PROFILE).write_text(json.dumps(about))
    random, written = np.random.default_rng(SEED), 0
    for pid in range(1, PROCESSES + 1):
        own = folder / f"host-{pid}-1"
        own.mkdir()
        clock = {"monotonic_ns": 0, "unix_ns": 0, "error_ns": 0}
        process = {"name": f"worker {pid}", "pid": pid, "parent": 0, "argv": [], "metadata": {}, "python": ""}
        (own / PROCESS).write_text(json.dumps(process | {"clock": clock}))
        names = [json.dumps({"id": name, "name": text}) for name, text in enumerate(OPERATIONS, start=1)]
        (own / NAMES).write_text("\n".join([*names, ""]))
        for thread in range(THREADS):
            start = 10**6 + 777 * (pid + 10 * thread)
            events = thread_events(random, count // (PROCESSES * THREADS), start, loops)
            head = HEADER.pack(MAGIC, VERSION, RECORD.size, pid + thread, len(events), len(events), 0, 0, 0)
            (own / f"{pid + thread}-0.events").write_bytes(head + events.tobytes())
            written += len(events)
    return written


def evaluate(folder: Path) -> dict[str, float]:
    """Seconds and CPU seconds of an evaluation, and the memory that it adds to the process."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak was the parent's
    before, cpu, start = _peak_bytes(), time.process_time(), time.perf_counter()
    found = breakdown(read_profile(folder))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"seconds": seconds, "cpu_s": cpu, "bytes": _peak_bytes() - before, "rows": len(found.rows)}


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "events.json")
    args = parser.parse_args()
    rows = []
    for loops in LOOPS:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "profile"
            count = write_profile(folder, args.events, loops)
            for _ in range(args.repeats):
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = {"events": count, "loops": loops} | pool.apply(evaluate, (folder,))
                print(" ".join(f"{name} {value:,.2f}" for name, value in row.items()), flush=True)
                rows.append(row)
    write_results(args.out, {"origin": origin(), "rows": rows})


if __name__ == "__main__":
    main()
