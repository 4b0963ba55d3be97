"""The profiler's shares of a program's stages beside those of py-spy, which samples stacks from another process.

    python -m experiments.profiler.sampling --peers PEERS

Stable-Baselines3's PPO and A2C on Walker2d-v5, one thread, by turns under ``rayagi profile`` and py-spy. A sample belongs to
the stage whose function is in its stack; samples outside of ``learn`` are left out. Writes ``results/sampling.json``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from experiments.profiler.stages import INFER, LEARN, SIMULATE
from experiments.profiler.survey import RESULTS, ROOT, WALKER
from experiments.scripts import command_line, origin, write_results
from rayagi.profiler.overlap import NO_ITERATION, breakdown
from rayagi.profiler.trace import read_profile

ITERATIONS = {"ppo": 8, "a2c": 20}
RATE = 200
"""Samples a second."""
OTHER = "other"
FUNCTIONS = {
    LEARN: ("train (stable_baselines3/ppo/ppo.py:", "train (stable_baselines3/a2c/a2c.py:"),
    SIMULATE: ("step (stable_baselines3/common/vec_env/base_vec_env.py:",),
    INFER: ("forward (stable_baselines3/common/policies.py:",),
}
"""What ``stages`` annotates, as py-spy names it, with a line number after it."""
LOOP = "learn (stable_baselines3/common/on_policy_algorithm.py:"


def sampled(stacks: str) -> dict[str, float]:
    """Share of each stage in py-spy's raw format: lines of frames, from the outermost, and the number of samples.

    Raises:
        ValueError: none is of the loop.
    """
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, number = line.rpartition(" ")
        if LOOP in stack:
            stage = next(
                (name for name, those in FUNCTIONS.items() if any(each in stack for each in those)), OTHER
            )
            counts[stage] += int(number)
    if not counts:
        raise ValueError(f"no sample is within {LOOP}: another version of the library?")
    return {name: count / counts.total() for name, count in counts.items()}


def recorded(profile: Path) -> dict[str, float]:
    """Share of each stage in a profile's iterations."""
    times: Counter[str] = Counter()
    for row in breakdown(read_profile(profile)).merged:
        if row.cell.iteration != NO_ITERATION:
            times[row.cell.operation if row.cell.operation in FUNCTIONS else OTHER] += row.ns
    return {name: ns / times.total() for name, ns in times.items()}


def measure(algorithm: str, peers: Path) -> dict[str, dict[str, float]]:
    """One turn of each."""
    python = peers / "base" / "bin"
    program = [str(python / "python"), "-m", "experiments.profiler.stages", "sb3", algorithm, WALKER]
    program += ["--iterations", str(ITERATIONS[algorithm])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        profile, stacks = Path(folder) / "profile", Path(folder) / "stacks.txt"
        own = [sys.executable, "-m", "rayagi", "profile", "--out", str(profile), "--"]
        sampler = [str(python / "py-spy"), "record", "--format", "raw", "--function", "--rate", str(RATE)]
        for tool in (own, [*sampler, "--output", str(stacks), "--"]):
            subprocess.run([*tool, *program], env=environment, cwd=ROOT, check=True, capture_output=True)
        return {"profile": recorded(profile), "py-spy": sampled(stacks.read_text())}


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder of experiments/peers/setup.sh")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "sampling.json")
    given = parser.parse_args()
    rows = []
    for repeat in range(given.repeats):
        for algorithm in ITERATIONS:
            row = {"algorithm": algorithm, "repeat": repeat, "load_average_before": os.getloadavg()[0]}
            row |= measure(algorithm, given.peers.absolute())
            for tool in ("profile", "py-spy"):
                shares = " ".join(
                    f"{name} {100 * row[tool].get(name, 0):5.1f} %" for name in (*FUNCTIONS, OTHER)
                )
                print(f"{algorithm} {tool:8} {shares}", flush=True)
            rows.append(row)
    write_results(given.out, {"origin": origin(), "rows": rows})


if __name__ == "__main__":
    main()
