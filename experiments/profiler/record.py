"""What recording one event costs, for each kind of hook, with and without the two readings of the clock that it needs.

    python -m experiments.profiler.record --repeats 5

Loops of one hook, without a profile and within one; a repeat is the fastest of 40 loops of 20,000. The native call is
``zlib.crc32(b"")``. Loops that small stay in the caches: in a program an event costs more, which
``rayagi profile calibrate`` measures. Writes ``results/record.json``.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
import zlib
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from statistics import median

from collectives.compiler import load
from experiments.scripts import command_line, origin, write_results
from rayagi import profiler
from rayagi.profiler.layout import Category

RESULTS = Path(__file__).parent / "results"
LOOPS, EVENTS = 40, 20_000
_CLOCK = """
#include <time.h>
double clock_ns(int count) {
    struct timespec start, end, t;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < count; i++) clock_gettime(CLOCK_MONOTONIC, &t);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / count;
}
"""
_operation = profiler.operation("measured")


def operations(count: int) -> None:
    """Open and close a scope, empty."""
    for _ in repeat(None, count):
        with _operation:
            pass


def activities(count: int) -> None:
    """Record an activity, empty."""
    for _ in repeat(None, count):
        with profiler.activity(Category.WAIT, "measured"):
            pass


def native_calls(count: int) -> None:
    """Call a native function that does nothing."""
    call = zlib.crc32
    for _ in repeat(None, count):
        call(b"")


def python_clock(count: int) -> None:
    """Read the clock as an activity does."""
    read = time.monotonic_ns
    for _ in repeat(None, count):
        read()


HOOKS = {"operation": operations, "activity": activities, "native call": native_calls}


def fastest_ns(loop: Callable[[int], None]) -> float:
    """Of one turn of the loop."""
    best = float("inf")
    for _ in range(LOOPS):
        start = time.perf_counter_ns()
        loop(EVENTS)
        best = min(best, (time.perf_counter_ns() - start) / EVENTS)
    return best


def measure() -> dict[str, dict[str, float]]:
    """By kind of hook, ns: without a profile, recorded, what two readings of the clock cost, and the rest."""
    clock = load(_CLOCK).clock_ns
    clock.restype, clock.argtypes = ctypes.c_double, (ctypes.c_int,)
    in_c, in_python = min(clock(EVENTS) for _ in range(LOOPS)), fastest_ns(python_clock)
    clocks = {name: 2 * (in_python if name == "activity" else in_c) for name in HOOKS}
    without = {name: fastest_ns(loop) for name, loop in HOOKS.items()}
    with tempfile.TemporaryDirectory() as folder, profiler.profile(folder, natives=["zlib"]):
        recorded = {name: fastest_ns(loop) for name, loop in HOOKS.items()}
    return {
        name: {
            "without_ns": without[name],
            "recorded_ns": recorded[name],
            "clocks_ns": clocks[name],
            "rest_ns": recorded[name] - without[name] - clocks[name],
        }
        for name in HOOKS
    }


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "record.json")
    args = parser.parse_args()
    rows = [measure() for _ in range(args.repeats)]
    for name in HOOKS:
        cells = {key: [row[name][key] for row in rows] for key in rows[0][name]}
        line = ", ".join(
            f"{key} {median(each):.0f} [{min(each):.0f}-{max(each):.0f}]" for key, each in cells.items()
        )
        print(f"{name}: {line}", flush=True)
    write_results(args.out, {"origin": origin(), "rows": rows})


if __name__ == "__main__":
    main()
