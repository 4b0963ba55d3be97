"""What do GMIs that wait for each other lose where the speed of a core changes by itself?

    python -m experiments.gains.cores --repeats 3 --seconds 60

Every core repeats the same piece of physics for a while, all at the same time. From when the pieces ended follows how long
GMIs take that each do a round's work on a core of their own and wait for the slowest, and how long threads take that share
all pieces. Writes ``results/cores.json``.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.scripts import command_line, origin, write_results

RESULTS = Path(__file__).parent / "results" / "cores.json"
ROUNDS_S = (0.1, 0.3, 1.0, 3.0)
PIECE_STEPS = 20


def ends_of_pieces(core: int, begin: float, seconds: float) -> list[float]:
    """Seconds after ``begin`` (of time.time) at which each piece ended, on one core. A piece is 20 steps from one state."""
    import gymnasium
    import mujoco

    os.sched_setaffinity(0, {core})
    model = gymnasium.make("Humanoid-v5").unwrapped.model
    data, ends = mujoco.MjData(model), []
    while (now := time.time()) < begin + seconds:
        mujoco.mj_resetData(model, data)
        mujoco.mj_step(model, data, nstep=PIECE_STEPS)
        if now >= begin:
            ends.append(time.time() - begin)
    return ends


def waiting_over_shared(ends: list[list[float]], round_s: float) -> float:
    """Throughput of GMIs that wait for the slowest over that of threads that share the pieces.

    Args:
        ends: of each core, when its pieces ended
        round_s: how long a round lasts where all cores have their mean speed
    """
    horizon = min(each[-1] for each in ends)
    clocks = [np.concatenate(([0.0], each)) for each in ends]
    per_core = round_s * sum(len(each) / each[-1] for each in ends) / len(ends)  # pieces of a round

    def done(core: int, at: float) -> float:
        return float(np.interp(at, clocks[core], np.arange(len(clocks[core]))))

    def time_of(core: int, pieces: float) -> float:
        return float(np.interp(pieces, np.arange(len(clocks[core])), clocks[core]))

    # Each GMI does per_core pieces, from when the slowest ended its round: t <- max_i time at which core i has done them.
    waiting, rounds = 0.0, 0
    while True:
        end = max(time_of(core, done(core, waiting) + per_core) for core in range(len(ends)))
        if end >= horizon:
            break
        waiting, rounds = end, rounds + 1
    # Shared: as many pieces as the same time holds, of all cores.
    shared = sum(done(core, waiting) for core in range(len(ends)))
    return rounds * per_core * len(ends) / shared


def speeds(ends: list[float], window_s: float = 0.5) -> NDArray[np.float64]:
    """Pieces a second in each window."""
    edges = np.arange(0.0, ends[-1] + window_s / 2, window_s)
    return np.diff(np.searchsorted(ends, edges, side="right")) / window_s


def measured(seconds: float) -> dict[str, Any]:
    """One row: each core's pieces a second (percentiles 5, 25, 50, 75, 95), and the ratio for rounds of each length."""
    cores = sorted(os.sched_getaffinity(0))
    with ProcessPoolExecutor(len(cores), mp_context=get_context("spawn")) as pool:
        begin = time.time() + 10.0  # all have started by then
        ends = list(pool.map(ends_of_pieces, cores, repeat(begin), repeat(seconds)))
    return {
        "pieces_per_s": {
            str(core): [round(float(value), 1) for value in np.percentile(speeds(each), [5, 25, 50, 75, 95])]
            for core, each in zip(cores, ends, strict=True)
        },
        "waiting_over_shared": {str(r): round(waiting_over_shared(ends, r), 3) for r in ROUNDS_S},
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each repeat (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    report: dict[str, Any] = {"origin": origin(), "seconds": given.seconds, "rows": []}
    for _ in range(given.repeats):
        report["rows"].append(measured(given.seconds))
        print(json.dumps(report["rows"][-1]), flush=True)
        write_results(given.out, report)


if __name__ == "__main__":
    main()
