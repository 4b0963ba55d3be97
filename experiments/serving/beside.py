"""Latency of a client that asks for one observation, by turns alone and beside one that asks for 4096 at a time.

python -m experiments.serving.beside --run runs/NAME --output experiments/serving/results
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from experiments.scripts import origin
from experiments.serving.answers import measure, serving
from rayagi.run.atomic import replace_json
from rayagi.serving.client import PolicyClient

LARGE_ROWS = 4096
FIGURES = ("requests_per_s", "p50_ms", "p90_ms", "p99_ms")
# Asks until it is ended, JSON over HTTP or raw float32 over the socket; a line for each answer.
_LARGE = """
import http.client, json, sys
from urllib.parse import urlsplit
import numpy as np
from rayagi.serving.client import PolicyClient
address, rows, obs_dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
obs = np.random.default_rng(1).standard_normal((rows, obs_dim))
if address.startswith("unix:"):
    client = PolicyClient(address, timeout_s=60)
    ask = lambda: client.act(obs)
else:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    body = json.dumps({"obs": obs.tolist()}).encode()
    def ask():
        connection.request("POST", "/act", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
while True:
    ask()
    print("answered", flush=True)
"""


@contextmanager
def asking(address: str, obs_dim: int) -> Iterator[list[str]]:
    """A large client that asks meanwhile; afterwards the list has a line for each answer."""
    command = [sys.executable, "-c", _LARGE, address, str(LARGE_ROWS), str(obs_dim)]
    answers: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the large client ended with {process.wait()}")
        yield answers
    finally:
        process.terminate()
        answers.extend(process.communicate()[0].splitlines())


def measure_beside(addresses: tuple[str, str], obs_dim: int, seconds: float) -> list[dict[str, Any]]:
    """One row for each frontend of the small client and each kind of large client."""
    rows = []
    for frontend, address in zip(("http", "socket"), addresses, strict=True):
        for beside, large in (
            ("nobody", None),
            ("JSON over HTTP", addresses[0]),
            ("raw, socket", addresses[1]),
        ):
            row: dict[str, Any] = {"frontend": frontend, "beside": beside}
            if large is None:
                rows.append({**row, **measure(address, 1, seconds, obs_dim)})
            else:
                with asking(large, obs_dim) as answers:
                    found = measure(address, 1, seconds, obs_dim)
                rows.append({**row, **found, "large_answers": len(answers)})
            print(rows[-1], flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median, least and largest of each figure over the rounds."""
    kinds = dict.fromkeys((row["frontend"], row["beside"]) for row in rows)
    found = []
    for frontend, beside in kinds:
        mine = [row for row in rows if (row["frontend"], row["beside"]) == (frontend, beside)]
        figures = {key: [row[key] for row in mine] for key in FIGURES}
        spread = {key: [median(values), min(values), max(values)] for key, values in figures.items()}
        found.append({"frontend": frontend, "beside": beside, "rounds": len(mine), **spread})
    return found


def main() -> None:
    """Measure all by turns, several rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--output", type=Path, help="folder for beside.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, serving(arguments.run, Path(folder)) as addresses:
        with PolicyClient(addresses[1]) as client:
            info = client.info()
        for _ in range(arguments.rounds):
            rows += measure_beside(addresses, info["obs_dim"], arguments.seconds)
    result = {"origin": origin(), "task": info["task"], "large_rows": LARGE_ROWS, "summary": summary(rows)}
    for row in result["summary"]:
        print(row)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        replace_json(arguments.output / "beside.json", {**result, "rows": rows})


if __name__ == "__main__":
    main()
