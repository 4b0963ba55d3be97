"""``rayagi channels``: live statistics of the experience channels on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from collectives.experience.inspection import ConsumerStats, ProducerRingStats, list_producer_rings
from placement.text import aligned

_CLEAR = "\x1b[H\x1b[2J"
_HEADS = (
    "producer",
    "process",
    "batches",
    "batches/s",
    "MB/s",
    "version",
    "slots",
    "blocked",
    "reposted",
    "consumers",
)


def run(arguments: argparse.Namespace) -> int:
    """Take two snapshots, or more until Ctrl-C, and print rates. Returns the exit code."""
    try:
        before = _read_stats()
        while True:
            time.sleep(arguments.every)
            after = _read_stats()
            _show(before, after, arguments)
            if not arguments.watch:
                return 0
            before = after
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
        return 0


def _read_stats() -> list[ProducerRingStats]:
    return [file.stats() for file in list_producer_rings()]


def _show(
    before: Sequence[ProducerRingStats], after: Sequence[ProducerRingStats], arguments: argparse.Namespace
) -> None:
    known = {stats.inode: stats for stats in before}
    rated = [(stats, rates(known.get(stats.inode, stats), stats)) for stats in after]
    if arguments.json:
        values = [_value(stats, rate) for stats, rate in rated]
        print(json.dumps(values, indent=None if arguments.watch else 2), flush=True)
        return
    text = "\n".join(_described(rated))
    print(_CLEAR + text if arguments.watch and sys.stdout.isatty() else text, flush=True)


def rates(before: ProducerRingStats, after: ProducerRingStats) -> dict[str, float]:
    """Rates between two snapshots of one producer ring."""
    elapsed_s = after.at_s - before.at_s

    def per_s(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / elapsed_s if elapsed_s > 0 else 0.0

    return {
        "batches_per_s": per_s("committed"),
        "rows_per_s": per_s("committed_rows"),
        "bytes_per_s": per_s("committed_bytes"),
        "blocked_share": min(1.0, per_s("blocked_s")),
    }


def _value(stats: ProducerRingStats, rate: dict[str, float]) -> dict[str, Any]:
    schema = stats.schema
    numbers = {name: value for name, value in asdict(stats).items() if name not in ("schema", "at_s")}
    return {
        "channel": schema.name,
        "fields": [str(field) for field in schema.fields],
        "row_bytes": schema.row_bytes,
        **numbers,
        **rate,
    }


def _described(rated: Sequence[tuple[ProducerRingStats, dict[str, float]]]) -> list[str]:
    if not rated:
        return ["No channel of yours is live on this machine: training and serving open them while they run."]
    lines: list[str] = []
    for schema, group in groupby(rated, key=lambda one: one[0].schema):
        members = list(group)
        fields = ", ".join(map(str, schema.fields))
        lines += [f"channel {schema.name}: {fields}; {schema.row_bytes:,} bytes a row"]
        lines += [f"  {line}" for line in aligned([_HEADS, *(_row(*one) for one in members)])]
    return lines


def _row(stats: ProducerRingStats, rate: dict[str, float]) -> tuple[str, ...]:
    return (
        str(stats.producer),
        str(stats.pid) if stats.alive else f"{stats.pid} (ended)",
        f"{stats.committed:,}",
        f"{rate['batches_per_s']:.1f}",
        f"{rate['bytes_per_s'] / 1e6:.1f}",
        str(stats.version),
        f"{stats.in_use}/{stats.slots}",
        f"{rate['blocked_share']:.0%}",
        str(stats.reposted),
        "; ".join(map(_consumer, stats.consumers)) or "none",
    )


def _consumer(stats: ConsumerStats) -> str:
    held = f"{stats.pid}: {stats.backlog} ({stats.backlog - stats.untaken} taken), lag {stats.lag}"
    return held if stats.found else f"{held}, not attached"
