"""All-reduce between hosts by TCP and by torch's Gloo: seconds, and CPU time, beside the time that the link needs.

    python -m experiments.nodes.reduce                      # about 2 minutes, needs root

Hosts are those of experiments.nodes.hosts, with a whole core each. Each repeat has all transports in turn, in new
processes. Writes results/reduce.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from collectives.costs import all_reduce_s
from collectives.rendezvous import Member, poll
from collectives.transports.base import TransportGroup
from collectives.transports.registry import TRANSPORTS
from experiments.nodes.hosts import Host, hosts, missing
from experiments.scripts import command_line, origin

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 60.0
WARM_UP = 5
Row = dict[str, Any]


def member(name: str, rank: int, addresses: Sequence[str], nbytes: int, count: int, board: Path) -> Row:
    """One member's seconds and CPU seconds of an all-reduce, and of a barrier. Texts are published as files."""
    torch.set_num_threads(1)
    members = [
        Member(rank=place, hostname=address, host_id=address, pid=place, address=address)
        for place, address in enumerate(addresses)
    ]

    def publish(key: str, text: str) -> None:
        (board / "being written").with_suffix(f".{rank}").write_text(text)
        (board / "being written").with_suffix(f".{rank}").rename(board / key)

    def published(_: Member, key: str) -> str:
        return str(poll(lambda: (board / key).read_text() if (board / key).exists() else None, LIMIT_S))

    group = TransportGroup(
        members=members,
        rank=rank,
        key=name,
        device=torch.device("cpu"),
        timeout_s=LIMIT_S,
        check=lambda waited_s: None,
        publish=publish,
        published=published,
    )
    transport = next(each for each in TRANSPORTS if each.name == name).connect(group)
    assert not isinstance(transport, str)
    tensor = torch.zeros(nbytes // 4)
    found: Row = {}
    for what, operation in (
        ("all_reduce", lambda: transport.all_reduce(tensor)),
        ("barrier", transport.barrier),
    ):
        for _ in range(WARM_UP):
            operation()
        transport.barrier()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            operation()
        found[f"{what}_s"] = (time.perf_counter() - began_s) / count
        found[f"{what}_cpu_s"] = (time.process_time() - cpu_s) / count
    transport.close()
    return found


def measure(name: str, others: Sequence[Host], nbytes: int, count: int) -> Row:
    """The slowest member's figures.

    Raises:
        RuntimeError: a member failed.
    """
    with tempfile.TemporaryDirectory() as board:
        own = [sys.executable, "-m", "experiments.nodes.reduce", "--member", name]
        own += ["--bytes", str(nbytes), "--count", str(count), "--board", board]
        own += ["--addresses", *(host.address for host in others)]
        running = [
            subprocess.Popen(
                host.command(*own, "--rank", str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank, host in enumerate(others)
        ]
        answers = [process.communicate(timeout=2 * LIMIT_S) for process in running]
    # Not by its exit code: Gloo's threads may end a process that has answered and goes.
    if failed := [error for output, error in answers if not output.startswith("{")]:
        raise RuntimeError(failed[0][-500:])
    rows = [json.loads(output.splitlines()[-1]) for output, _ in answers]
    return {what: max(row[what] for row in rows) for what in rows[0]}


def table(rows: Sequence[Row]) -> str:
    """Markdown: medians over repeats (least - most); share of the link: the time it needs over the time it took."""
    head = ["hosts", "bytes", "by", "all-reduce, ms", "share of the link", "CPU, ms", "barrier, ms"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for count, nbytes, name in dict.fromkeys((row["hosts"], row["bytes"], row["by"]) for row in rows):
        same = [row for row in rows if (row["hosts"], row["bytes"], row["by"]) == (count, nbytes, name)]
        taken = [1e3 * row["all_reduce_s"] for row in same]
        middle = statistics.median(taken)
        needed = 1e3 * all_reduce_s(count, nbytes, same[0]["megabits"] * 1e6 / 8)
        cpu, barrier = (
            1e3 * statistics.median(row[what] for row in same) for what in ("all_reduce_cpu_s", "barrier_s")
        )
        cells = [count, f"{nbytes:,}", name, f"{middle:.2f} ({min(taken):.2f} - {max(taken):.2f})"]
        cells += [f"{needed / middle:.2f}", f"{cpu:.2f}", f"{barrier:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bytes", type=int, nargs="+", default=[1_000, 367_924, 4_000_000])
    parser.add_argument("--by", nargs="+", default=["tcp", "gloo"], help="transports")
    parser.add_argument("--megabits", type=float, default=1000.0, help="of each link, per second")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    for name, kind in (("--member", str), ("--rank", int), ("--board", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.member:
        found = member(given.member, given.rank, given.addresses, given.bytes[0], given.count, given.board)
        print(json.dumps(found), flush=True)
        return
    if why := missing():
        parser.error(why)
    rows: list[Row] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for count in given.hosts:
        with hosts(count, share=1.0, megabits=given.megabits) as (_, others):
            for nbytes in given.bytes:
                for repeat in range(given.repeats):
                    for name in given.by:
                        row = measure(name, others, nbytes, given.count)
                        case = {"hosts": count, "bytes": nbytes, "by": name, "repeat": repeat}
                        rows.append(case | row | {"megabits": given.megabits})
                        print(json.dumps(rows[-1]), flush=True)
    (given.out / "reduce.json").write_text(json.dumps({"origin": origin(), "rows": rows}) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
