"""The same training on one GPU: one process, plain sharing, and MPS with 1 to 4 shares.

    python -m experiments.gpu_sharing.run --seconds 20 --repeats 3

Every case trains the same 3072 environments, split evenly over its GMIs; cases are interleaved. Needs a GPU and
nvidia-cuda-mps-control, and says so where they are missing. Writes a JSON file and a table into ``results/``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.origin import origin
from placement.errors import PlacementError
from placement.inventory import local_machine
from placement.types import Node
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.session import Session

TOTAL_ENVS, ROLLOUT_LENGTH = 3072, 32
PHASES = ("simulate_s", "act_s", "update_s", "sync_s")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """One way of using one GPU."""

    backend: str
    shares: int

    @property
    def name(self) -> str:
        """As in the table."""
        return (
            "single process"
            if self.backend == "direct" and self.shares == 1
            else f"{self.backend} x{self.shares}"
        )


CASES = [
    *(Case("direct", shares) for shares in (1, 2, 3, 4)),
    *(Case("mps", shares) for shares in (1, 2, 3, 4)),
]


def run_spec(case: Case) -> RunSpec:
    """Ant-v5 with the papers' network; the batch of an update is the same in every case."""
    return RunSpec(
        env=EnvSpec(id="Ant-v5"),
        gmi=GmiSpec(
            backend=case.backend,  # type: ignore[arg-type]  # the cases' names are backends
            num_gmis=case.shares,
            gmis_per_gpu=case.shares,
            num_envs=TOTAL_ENVS // case.shares,
        ),
        network=NetworkSpec(hidden=(256, 128, 64)),
        learning=PPOSpec(rollout_length=ROLLOUT_LENGTH, num_epochs=4, num_minibatches=4),
        seed=1,
    )


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Train for ``seconds`` after two iterations to warm up; steps/s, where the time went, and what was carved."""
    with Session(run_spec(case)) as session:
        session.train(2)
        began, results = time.perf_counter(), []
        while time.perf_counter() - began < seconds:
            results += session.train(1)
        elapsed_s = time.perf_counter() - began
        shares = [gmi_slice.share for gmi_slice in session.plan.slices]
    total_s = sum(result.metrics["iteration_s"] for result in results)
    return {
        "case": case.name,
        "steps_per_s": round(sum(result.metrics["env_steps"] for result in results) / elapsed_s, 1),
        "iterations": len(results),
        "time_split": {name: round(sum(r.metrics[name] for r in results) / total_s, 4) for name in PHASES},
        "sms_per_share": [share.sm_count for share in shares if share is not None],
        "static_partitions": any(share is not None and share.sm_partition is not None for share in shares),
    }


def missing(node: Node) -> str | None:
    """What this machine lacks for the comparison; None where it has all."""
    if not node.gpus:
        return "there is no GPU here"
    if not node.mps_control:
        return "nvidia-cuda-mps-control is not on PATH"
    return None


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over the repeats, against the single process."""
    rates = {case.name: [run["steps_per_s"] for run in runs if run["case"] == case.name] for case in CASES}
    middle = {name: median(found) for name, found in rates.items() if found}
    single = middle.get("single process")
    lines = ["| case | steps/s, median | lowest - highest | against a single process |", "|---|---|---|---|"]
    for name, rate in middle.items():
        ratio = f"{rate / single:.2f}" if single else "-"
        lines.append(f"| {name} | {rate:.0f} | {min(rates[name]):.0f} - {max(rates[name]):.0f} | {ratio} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    (node,) = local_machine().nodes
    lack = missing(node)
    if lack is not None:
        print(f"Nothing was measured: {lack}.", file=sys.stderr)
        return 1
    runs: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        for case in CASES:
            try:
                runs.append(measure(case, arguments.seconds))
            except PlacementError as error:
                runs.append({"case": case.name, "failed": str(error)})
            print(json.dumps(runs[-1]), flush=True)
    done = [run for run in runs if "failed" not in run]
    arguments.out.mkdir(parents=True, exist_ok=True)
    gpu = node.gpus[0]
    stem = f"{gpu.name.replace(' ', '_').lower()}_{time.strftime('%Y-%m-%d_%H%M')}"
    head = {**origin(), "gpu": gpu.name, "driver": node.driver_version, "seconds": arguments.seconds}
    (arguments.out / f"{stem}.json").write_text(json.dumps({"origin": head, "runs": runs}, indent=2) + "\n")
    (arguments.out / f"{stem}.md").write_text(f"{gpu.name}, driver {node.driver_version}\n\n{table(done)}")
    print(table(done))
    return 0 if len(done) == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
