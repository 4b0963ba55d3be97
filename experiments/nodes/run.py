"""Table 5 of GMI-DRL (ATC 2025): training throughput of several nodes over one, beside the model's.

    python -m experiments.nodes.run                         # about 50 minutes, needs root
    python -m experiments.nodes.run --tasks Ant-v5 --nodes 1 2 --megabits 1000 --repeats 1

A node is a host of experiments.nodes.hosts with a raylet and one GMI of 64 environments, so more nodes have more
environments, as in the paper. Each repeat has, for each task and number of nodes:

    together   one training over all nodes
    apart      as many trainings of one node at the same time, which send each other nothing

together / apart is what reductions over the links cost, whatever the machine is slowed down by more processes. The model
(`rayagi plan --nodes`) adds a ring's time to a node's measured iteration: gradients of all updates, one after the other.
Writes results/nodes.json after each run, and nodes.png; started again, it measures what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
from matplotlib.figure import Figure

from collectives.costs import all_reduce_s
from experiments.nodes.hosts import Host, hosts, missing
from experiments.scripts import command_line, origin, spread, task_id
from experiments.throughput.settings import ROLLOUT_LENGTH, run_spec
from rayagi.coordinator.cluster_forecast import HOP_LATENCY_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PORT = 6379
ENVS = 64
UPDATES = 16
"""Of an iteration: 4 epochs of 4 minibatches."""
START_S, RUN_S = 90.0, 300.0
Row = dict[str, Any]


@contextmanager
def ray_cluster(head: Host, others: Sequence[Host], folder: Path) -> Iterator[dict[str, str]]:
    """A raylet on each host; the head has no CPUs to give. Yields the environment of a program that uses the cluster."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = {**os.environ, **token, "OMP_NUM_THREADS": "1"}
    address = f"{head.address}:{PORT}"
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
    memory = ["--object-store-memory", str(100 * 2**20)]
    first = [*ray, "--head", "--node-ip-address", head.address, "--port", str(PORT), "--num-cpus", "0"]
    first += ["--include-dashboard", "false", "--temp-dir", str(folder), *memory]
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "ray.log").open("wb") as log:
        try:
            started.append(_start(head.command(*first), log, env))
            env["RAY_ADDRESS"] = address
            _wait_for_nodes(head, 1, env)
            for host in others:
                own = [*ray, "--address", address, "--node-ip-address", host.address, "--num-cpus", "1"]
                started.append(_start(host.command(*own, *memory), log, env))
                # One after the other: two that start at once may choose the same names of sockets.
                _wait_for_nodes(head, len(started), env)
            yield env
        finally:
            for process in reversed(started):
                _end(process)


def _start(command: list[str], log: Any, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=log, stderr=log, env=dict(env), start_new_session=True)


def _wait_for_nodes(head: Host, count: int, env: Mapping[str, str]) -> None:
    """Until all raylets have joined; a new one takes seconds, as does asking."""
    ask = "import ray; ray.init(log_to_driver=False); print(sum(node['Alive'] for node in ray.nodes()))"
    command = head.command(sys.executable, "-c", ask)
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(env))
        if ran.stdout.split()[-1:] == [str(count)]:
            return
        time.sleep(1)
    raise RuntimeError(f"not all of {count} nodes joined Ray within {START_S:.0f} s: {ran.stderr[-300:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """`ray start --block` ends its raylet when it is asked to."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


def training(task: str, gmis: int, seconds: float) -> list[str]:
    """A run of ``gmis`` GMIs of one core."""
    command = [sys.executable, "-m", "experiments.throughput.ours", "--task", task, "--gmis", str(gmis)]
    return [*command, "--envs", str(ENVS), "--seconds", str(seconds)]


def measure(commands: Sequence[list[str]], env: Mapping[str, str]) -> list[Row]:
    """Run trainings at the same time; returns the JSON line of each.

    Raises:
        RuntimeError: one of them failed; with the end of what it wrote.
    """
    running = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=dict(env)
        )
        for command in commands
    ]
    rows = []
    try:
        for process in running:
            output, error = process.communicate(timeout=RUN_S)
            lines = [line for line in output.splitlines() if line.startswith("{")]
            if process.returncode or not lines:
                raise RuntimeError(error[-500:] or output[-500:])
            rows.append(json.loads(lines[-1]))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait(30)
    return rows


def case(
    task: str, count: int, is_apart: bool, given: argparse.Namespace, head: Host, env: Mapping[str, str]
) -> Row:
    """One training over ``count`` nodes, or as many trainings of one; one that fails is a row that says so."""
    runs, gmis = (count, 1) if is_apart else (1, count)
    try:
        rows = measure([head.command(*training(task, gmis, given.seconds))] * runs, env)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)}
    keep = ("time_split", "iterations", "cpu_ms_per_iteration")
    rate = sum(row["steps_per_s"] for row in rows)
    return {
        "steps_per_s": rate,
        "gradient_bytes": gradient_bytes(task),
        **{name: rows[0][name] for name in keep},
    }


def gradient_bytes(task: str) -> int:
    """Of the measured networks: one for actions and one for values, float32, and a deviation for each action."""
    env = gymnasium.make(task)
    (width,), (actions,) = env.observation_space.shape or (), env.action_space.shape or ()
    env.close()
    count = actions
    for outputs in (actions, 1):
        sizes = (width, *run_spec(1, 1, task=task).network.hidden, outputs)
        count += sum((before + 1) * after for before, after in pairwise(sizes))
    return 4 * count


@dataclass(frozen=True)
class Ratios:
    """Of each repeat, of one task, link and number of nodes."""

    over_one: list[float]
    """Throughput over that of one node."""
    over_apart: list[float]
    """Throughput over that of as many trainings of one node."""
    sync: list[float]
    """Share of the time in collectives."""
    modelled: float
    """Throughput over one node's, by the model."""


def ratios(rows: Sequence[Row], task: str, megabits: float, nodes: int) -> Ratios | None:
    """Within each repeat that has all three runs; None if there is none."""
    of_link = [row for row in rows if (row["task"], row["megabits"]) == (task, megabits)]
    by_case = {(row["nodes"], row["apart"], row["repeat"]): row for row in of_link}
    found = [
        (row, one, apart)
        for repeat in sorted({row["repeat"] for row in of_link})
        if (row := by_case.get((nodes, False, repeat)))
        and (one := by_case.get((1, False, repeat)))
        and (apart := by_case.get((nodes, True, repeat)))
    ]
    if not found:
        return None
    iteration_s = statistics.median(ENVS * ROLLOUT_LENGTH / one["steps_per_s"] for _, one, _ in found)
    return Ratios(
        over_one=[row["steps_per_s"] / one["steps_per_s"] for row, one, _ in found],
        over_apart=[row["steps_per_s"] / apart["steps_per_s"] for row, _, apart in found],
        sync=[row["time_split"]["sync_s"] for row, _, _ in found],
        modelled=modelled(nodes, iteration_s, found[0][0]["gradient_bytes"], megabits),
    )


def modelled(nodes: int, iteration_s: float, nbytes: int, megabits: float) -> float:
    """n T / (T + U R): a node's iteration of T seconds has U updates, each with a ring over the links of R seconds."""
    ring_s = all_reduce_s(nodes, nbytes, megabits * 1e6 / 8) + 2 * (nodes - 1) * HOP_LATENCY_S
    return nodes * iteration_s / (iteration_s + UPDATES * ring_s)


def cases(rows: Sequence[Row]) -> Iterator[tuple[str, float, int, Ratios]]:
    """Task, link in Mbit/s, nodes and ratios of all that is measured."""
    for task, megabits, nodes in sorted({(row["task"], row["megabits"], row["nodes"]) for row in rows}):
        if found := ratios(rows, task, megabits, nodes):
            yield task, megabits, nodes, found


def table(rows: Sequence[Row]) -> str:
    """Markdown: medians over repeats (least - most)."""
    head = ["task", "link", "nodes", "over one node", "by the model", "over as many apart", "synchronising"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for task, megabits, nodes, found in cases(rows):
        sync = 100 * statistics.median(found.sync)
        cells = [task, f"{megabits:,g} Mbit/s", nodes, spread(found.over_one), f"{found.modelled:.2f}"]
        cells += [spread(found.over_apart), f"{sync:.0f} %"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Throughput over one node's against nodes: points are measured, lines are the model's, up to 16 nodes."""
    found = list(cases(rows))
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 16], [1, 16], color="grey", linestyle=":", label="ideal")
    for number, (task, megabits) in enumerate(sorted({each[:2] for each in found})):
        own = [(nodes, each) for *link, nodes, each in found if tuple(link) == (task, megabits)]
        one = [row for row in rows if (row["task"], row["megabits"], row["nodes"]) == (task, megabits, 1)]
        iteration_s = ENVS * ROLLOUT_LENGTH / statistics.median(row["steps_per_s"] for row in one)
        curve = [modelled(nodes, iteration_s, one[0]["gradient_bytes"], megabits) for nodes in range(1, 17)]
        axes.plot(range(1, 17), curve, color=f"C{number}", label=f"{task}, {megabits:,g} Mbit/s")
        points = [(nodes, statistics.median(each.over_one)) for nodes, each in own]
        axes.plot(*zip(*points, strict=True), "o", color=f"C{number}")
    axes.set_xlabel("nodes")
    axes.set_ylabel("throughput over one node")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.suptitle("Several nodes: measured (points) and by the model (lines)", fontsize=10)
    figure.savefig(path, dpi=90)


def headline(rows: Sequence[Row]) -> str:
    """For docs/papers.md: throughput over one node's, and over as many apart, with the most nodes."""
    most = max(row["nodes"] for row in rows)
    parts = []
    for task, megabits, nodes, found in cases(rows):
        if nodes == most:
            over_one, over_apart = statistics.median(found.over_one), statistics.median(found.over_apart)
            parts.append(
                f"{task} over {megabits:,g} Mbit/s {over_one:.2f} (by the model {found.modelled:.2f}, over as many apart "
                f"{over_apart:.2f})"
            )
    return f"{most} nodes over one: {'; '.join(parts)}"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--tasks", nargs="+", type=task_id, default=["HalfCheetah-v5", "Humanoid-v5"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument(
        "--megabits", type=float, nargs="+", default=[1000.0], help="of each link, per second"
    )
    parser.add_argument(
        "--share", type=float, default=0.4, help="cores of a node: all of them must fit on the machine"
    )
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    if why := missing():
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # as Ctrl-C: hosts are removed
    cores = len(os.sched_getaffinity(0))
    if max(given.nodes) * given.share > cores:
        parser.error(
            f"{max(given.nodes)} nodes of {given.share:g} cores do not fit on {cores} cores: smaller --share"
        )
    path = given.out / "nodes.json"
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    for megabits in given.megabits:
        wanted = [
            {"task": task, "megabits": megabits, "nodes": nodes, "apart": is_apart, "repeat": repeat}
            for repeat in range(given.repeats)
            for task in given.tasks
            for nodes in given.nodes
            for is_apart in (False, True)
        ]
        left = [each for each in wanted if not any(each.items() <= row.items() for row in rows)]
        if not left:
            continue
        with cluster(given, megabits) as (head, env):
            for each in left:
                row = case(each["task"], each["nodes"], each["apart"], given, head, env)
                print(json.dumps(each | row), flush=True)
                if "failed" not in row:
                    rows.append(each | row | {"share": given.share, "origin": origin()})
                    path.write_text(json.dumps({"rows": rows}) + "\n", encoding="utf-8")
    print(table(rows))
    draw(rows, path.with_suffix(".png"))


@contextmanager
def cluster(given: argparse.Namespace, megabits: float) -> Iterator[tuple[Host, dict[str, str]]]:
    """As many hosts as the largest case needs, in a Ray cluster; those that a case does not need are idle."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes")))
        head, others = stack.enter_context(hosts(max(given.nodes), share=given.share, megabits=megabits))
        yield head, stack.enter_context(ray_cluster(head, others, folder))


if __name__ == "__main__":
    main()
