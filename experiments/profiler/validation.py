"""Are times right once the profiler's cost is subtracted? (RL-Scope, figure 11)

    experiments/peers/setup.sh PEERS      # virtual environments of the other libraries
    python -m experiments.profiler.validation --peers PEERS --rounds 3 --write

Calibrates each program, then runs it plain and recorded by turns. Prints the table of the README; --write keeps it with
every run in results/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.origin import origin

RAYAGI = [sys.executable, "-m", "rayagi"]
TRAIN = ["train", "--gmis", "1", "--seed", "0", "--evaluate-every", "1000"]


def programs(peers: Path) -> dict[str, list[str]]:
    """Commands by name: PPO and SAC of three libraries on Ant-v5, and PPO from pixels."""
    other = [str(peers / "base" / "bin" / "python"), "-m", "experiments.profiler.programs"]
    pixels = ["experiments.pixels.env:PixelReach-v0", "--config", "experiments/pixels/reach.yaml"]
    return {
        "rayagi PPO": [*RAYAGI, *TRAIN, "Ant-v5", "--iterations", "20"],
        "rayagi SAC": [*RAYAGI, *TRAIN, "Ant-v5", "--algorithm", "sac", "--iterations", "400"],
        "SB3 PPO": [*other, "sb3-ppo", "--steps", "8192"],
        "SB3 SAC": [*other, "sb3-sac", "--steps", "600"],
        "CleanRL PPO": [*other, "cleanrl-ppo", "--steps", "16384"],
        "CleanRL SAC": [*other, "cleanrl-sac", "--steps", "500"],
        "rayagi PPO, pixels": [*RAYAGI, *TRAIN, *pixels, "--iterations", "2"],
    }


def measure(command: list[str], rounds: int, runs: Path) -> dict[str, Any]:
    """Calibrate and validate one program."""
    if command[: len(RAYAGI)] == RAYAGI:
        command = [*command, "--out", str(runs)]
    options = ["--rounds", str(rounds)]
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        subprocess.run([*RAYAGI, "profile", "calibrate", *options, "--", *command], check=True)
        validate = [*RAYAGI, "profile", "validate", *options, "--json", found.name]
        subprocess.run([*validate, "--", *command], check=True)
        about: dict[str, Any] = json.loads(Path(found.name).read_text())
    return about


def row(name: str, found: dict[str, Any]) -> str:
    """A row of the table: CPU seconds, and errors before and after the correction, of CPU and wall-clock time."""
    values = found["validation"]
    plain = values["plain"]
    cells = [name, f"{mean(plain) / 1e9:.1f} +- {stdev(plain) / mean(plain):.1%}"]
    for each, of in (("instrumented", "plain"), ("corrected", "plain"), ("corrected_wall", "plain_wall")):
        cells.append(f"{100 * (mean(values[each]) / mean(values[of]) - 1):+.1f} %")
    return f"| {' | '.join([*cells, found['calibration'].split(', measured')[0]])} |"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", type=Path, default=Path("PEERS"), help="folder of experiments/peers/setup.sh"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, at least 2")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of: " + ", ".join(programs(Path())))
    parser.add_argument("--write", action="store_true", help="into results/")
    given = parser.parse_args()
    results: dict[str, Any] = {"origin": origin(), "programs": {}}
    for name, command in programs(given.peers).items():
        if given.only and name not in given.only:
            continue
        with tempfile.TemporaryDirectory() as runs:
            try:
                results["programs"][name] = measure(command, given.rounds, Path(runs))
            except subprocess.CalledProcessError as error:
                print(f"{name}: not measured, its command ended with {error.returncode}", flush=True)
    print(
        "\n| program | CPU seconds | recorded | corrected | corrected, wall clock | costs |\n|---|---|---|---|---|---|"
    )
    for name, found in results["programs"].items():
        print(row(name, found))
    if given.write:
        path = Path(__file__).parent / "results" / f"validation_{datetime.now(UTC):%Y-%m-%d_%H%M}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
