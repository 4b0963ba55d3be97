"""How fast the policy server answers one to many clients, each a process that asks again as soon as it was answered.

python -m experiments.serving.answers --run runs/NAME --output experiments/serving/results/answers.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.scripts import origin
from rayagi.run.atomic import replace_json
from rayagi.serving.client import PolicyClient

CLIENTS = (1, 4, 16)
# A client reports its latencies in seconds; it needs numpy and the client only.
_CLIENT = """
import json, sys, time
import numpy as np
from rayagi.serving.client import PolicyClient
address, begin_at, seconds, obs_dim = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
obs = np.random.default_rng(0).standard_normal((256, obs_dim)).astype(np.float32)
latencies = []
with PolicyClient(address, timeout_s=30) as policy:
    policy.act(obs[0])
    time.sleep(max(0.0, begin_at - time.time()))
    until = begin_at + seconds
    while (began := time.time()) < until:
        policy.act(obs[len(latencies) % 256])
        latencies.append(time.time() - began)
print(json.dumps(latencies))
"""


def measure(address: str, clients: int, seconds: float, obs_dim: int) -> dict[str, object]:
    """Requests per second, and latencies as the clients saw them, in milliseconds."""
    load = os.getloadavg()[0]
    begin_at = time.time() + 1.0 + 0.25 * clients  # clients start meanwhile
    command = [sys.executable, "-c", _CLIENT, address, str(begin_at), str(seconds), str(obs_dim)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(clients)]
    latencies = sorted(value for each in running for value in json.loads(each.communicate(timeout=300)[0]))

    def percentile(share: float) -> float:
        return round(1e3 * latencies[min(len(latencies) - 1, int(share * len(latencies)))], 3)

    return {
        "clients": clients,
        "load_before": round(load, 1),
        "requests_per_s": round(len(latencies) / seconds, 1),
        "p50_ms": percentile(0.5),
        "p90_ms": percentile(0.9),
        "p99_ms": percentile(0.99),
    }


@contextmanager
def serving(run: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """A server of its own process; its HTTP address and its socket's."""
    socket = folder / "s"
    where = ["--port", "0", "--unix", str(socket)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rayagi", "policy-server", str(run), *where], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            url = line.split()[-1] if line.startswith("HTTP at") else url
            if line.startswith("local socket"):
                break
        yield url, f"unix:{socket}"
    finally:
        process.terminate()
        process.communicate(timeout=30)


def main() -> None:
    """Measure every number of clients on both frontends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, serving(arguments.run, Path(folder)) as addresses:
        info = PolicyClient(addresses[1]).info()
        for frontend, address in zip(("http", "socket"), addresses, strict=True):
            for clients in CLIENTS:
                found = measure(address, clients, arguments.seconds, info["obs_dim"])
                rows.append({"frontend": frontend, **found})
                print(rows[-1], flush=True)
    if arguments.output is not None:
        replace_json(arguments.output, {"origin": origin(), "task": info["task"], "rows": rows})


if __name__ == "__main__":
    main()
