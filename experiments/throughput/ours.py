"""rayagi on one of the peers' tasks, measured like the peers: environment steps per second after the first iteration.

    python -m experiments.throughput.ours --task Ant-v5 --gmis 2 --threads 1 --seconds 20

Prints one JSON line.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from experiments.cores import process_cpu_s, stolen_seconds
from experiments.scripts import command_line
from experiments.throughput.settings import run_spec
from rayagi.config.spec import RunSpec
from rayagi.coordinator.session import Session
from rayagi.run.versions import rayagi_version


def gmis_cpu_s(pids: list[int]) -> float:
    """CPU seconds so far of the measurement's GMIs. Raises RuntimeError if one has ended: its time is lost."""
    used = {pid: process_cpu_s(pid) for pid in pids}
    if ended := [pid for pid, used_s in used.items() if used_s is None]:
        raise RuntimeError(
            f"GMI processes {ended} ended during the measurement; see their logs, and measure again"
        )
    return sum(used_s for used_s in used.values() if used_s is not None)


def measure(spec: RunSpec, seconds: float, started: float) -> dict[str, object]:
    """Train for ``seconds`` after the first iteration; where the time went is the mean over GMIs and iterations."""
    phases = ("simulate_s", "act_s", "update_s", "sync_s")
    num_gmis, threads_per_gmi = spec.gmi.num_gmis or 1, spec.gmi.threads_per_gmi or 1
    with Session(spec) as session:
        first = session.train(1)[0]
        began = time.time()
        startup_s = began - started
        results = [first]
        pids = [worker.pid for worker in session.workers]
        cpu_s, stolen_s = -gmis_cpu_s(pids), -stolen_seconds()
        session.submit(2)  # one request ahead, as `rayagi train` asks: GMIs do not wait for the driver
        while time.time() - began < seconds:
            session.submit(2)
            results += session.collect()
        results += session.collect()
        elapsed_s = time.time() - began
        cpu_s += gmis_cpu_s(pids)
        stolen_s += stolen_seconds()
    counted = results[1:]
    steps = sum(result.metrics["env_steps"] for result in counted)
    total_s = sum(result.metrics["iteration_s"] for result in counted)
    returns = [value for result in results for value in result.episode_returns][-100:]
    return {
        "peer": f"rayagi-{num_gmis}x{threads_per_gmi}",
        "version": rayagi_version(),
        "task": spec.env.id,
        "gmis": num_gmis,
        "threads_per_gmi": threads_per_gmi,
        "env_steps": int(steps),
        "train_seconds": round(elapsed_s, 2),
        "steps_per_s": round(steps / elapsed_s, 1),
        "mean_return_last": round(sum(returns) / len(returns), 2) if returns else None,
        "iterations": len(counted),
        "startup_s": round(startup_s, 2),
        "resident_mb_per_gmi": round(max(r.metrics["resident_bytes"] for r in counted) / 2**20),
        # What the GMIs' own work took of the wall time of their cores; the rest they waited or were not let run.
        "cpu_ms_per_iteration": round(1e3 * cpu_s / len(counted), 1),
        "stolen_cores": round(stolen_s / elapsed_s, 3),
        "cpu_share_of_gmis": round(cpu_s / elapsed_s / (num_gmis * threads_per_gmi), 4),
        "time_split": {name: round(sum(r.metrics[name] for r in counted) / total_s, 4) for name in phases},
        "iteration_share_of_wall": round(total_s / elapsed_s, 4),
    }


def main() -> None:
    """Command line."""
    started = time.time()
    parser = command_line(__doc__)
    parser.add_argument("--task", default="Ant-v5")
    parser.add_argument("--gmis", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="cores and threads of one GMI")
    parser.add_argument("--envs", type=int, help="environments of one GMI; else 64 are divided among them")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--started", type=float, default=started, help="time.time() of the caller, for start-up time"
    )
    given = parser.parse_args()
    spec = run_spec(given.gmis, given.threads, given.seed, given.task)
    if given.envs is not None:
        spec = replace(spec, gmi=replace(spec.gmi, num_envs=given.envs))
    print(json.dumps(measure(spec, given.seconds, given.started)), flush=True)


if __name__ == "__main__":
    main()
