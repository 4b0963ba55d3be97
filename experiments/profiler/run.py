"""Is the corrected CPU time within 5 % of the uninstrumented one? Validates on PPO and SAC of three libraries.

    python -m experiments.profiler.run --peers PEERS --repetitions 6

Writes results/overhead.json: for each program the CPU times of all repetitions, raw overhead, error after correction, the
calibration, and the origin. A program that fails is written as such. PEERS: the folder of experiments/peers/setup.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from collectives.files import cache_folder
from experiments.scripts import command_line, origin, write_results

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOAL = 0.05
RAYAGI = {
    "rayagi-ppo": ["Ant-v5", "--num-envs", "16", "--iterations", "30"],
    "rayagi-sac": ["Ant-v5", "--algorithm", "sac", "--iterations", "200"],
    "rayagi-pixels": [
        *("experiments.pixels.env:PixelReach-v0", "--config", str(ROOT / "experiments/pixels/reach.yaml")),
        *("--num-envs", "2", "--evaluate-every", "1000", "--iterations", "16"),
    ],
}
"""Arguments of ``rayagi train`` with one GMI."""
PEERS = {"sb3-ppo": 30, "sb3-sac": 48, "cleanrl-ppo": 21, "cleanrl-sac": 48}
"""Iterations of the programs in programs.py."""


def command(name: str, peers: Path, runs: Path) -> list[str]:
    """The program, from the repository's folder."""
    if name in RAYAGI:
        return [*(sys.executable, "-m", "rayagi", "train", *RAYAGI[name]), "--gmis", "1", "--out", str(runs)]
    python = str(peers / "base" / "bin" / "python")
    return [python, "-m", "experiments.profiler.programs", name, "--iterations", str(PEERS[name])]


def measure(name: str, program: list[str], repetitions: int) -> dict[str, Any]:
    """Calibrate, then validate in other runs."""
    with tempfile.TemporaryDirectory() as cache:
        (Path(cache) / "rayagi").mkdir()
        (Path(cache) / "rayagi" / "kernels").symlink_to(cache_folder("kernels"))
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
        own = [sys.executable, "-m", "rayagi", "profile"]
        calibrated = _run([*own, "calibrate", "--rounds", "30", "--", *program], environment)
        if calibrated.returncode:
            return {"program": name, "failed": calibrated.stderr.strip()}
        print(calibrated.stdout, flush=True)
        options = ["--json", "--repetitions", str(repetitions)]
        validated = _run([*own, "validate", *options, "--", *program], environment)
    if validated.returncode:
        return {"program": name, "failed": validated.stderr.strip()}
    return {"program": name, **json.loads(validated.stdout)}


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    if "failed" in row:
        return f"| {row['program']} | failed: {row['failed'].splitlines()[-1]} |"
    plain = sum(row["uninstrumented"]) / 1e9
    calls = row["calibration"]["calibration"]["hooks"]
    costs = ", ".join(f"{kind} {ns:.0f} ns" for kind, ns in calls.items())
    cells = [
        row["program"],
        f"{plain:.2f} s \N{PLUS-MINUS SIGN} {100 * row['spread']:.1f} %",
        f"{100 * row['overhead']:+.1f} %",
        f"{100 * row['error']:+.1f} % \N{PLUS-MINUS SIGN} {100 * row['error_spread']:.1f} %",
        costs,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    names = [*RAYAGI, *PEERS]
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--programs", nargs="+", choices=names, default=names)
    parser.add_argument("--repetitions", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "overhead.json")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {**origin(), "goal": GOAL, "programs": []}
    with tempfile.TemporaryDirectory() as runs:
        for name in given.programs:
            load = os.getloadavg()[0]
            row = measure(name, command(name, given.peers.absolute(), Path(runs)), given.repetitions)
            report["programs"].append({**row, "load_average_before": load})
            write_results(given.out, report)
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
