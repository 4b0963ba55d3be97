"""``rayagi channels``: what experience travels on this machine now."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from collectives.experience.inspection import ConsumerLook, OutboxFile, OutboxLook, outboxes
from placement.inventory.describing import table

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of an outbox between two looks."""

    batches_per_s: float
    rows_per_s: float
    bytes_per_s: float
    blocked_share: float


def run(arguments: argparse.Namespace) -> int:
    """Look twice, or until Ctrl-C; returns the exit code."""
    try:
        before = _look(outboxes())
        while True:
            time.sleep(arguments.every)
            after = _look(outboxes())
            _show(before, after, arguments)
            if not arguments.watch:
                return 0
            before = after
    except KeyboardInterrupt:
        if not arguments.watch:
            raise
        return 0


def _look(files: Sequence[OutboxFile]) -> list[OutboxLook]:
    return [file.look() for file in files]


def _show(before: Sequence[OutboxLook], after: Sequence[OutboxLook], arguments: argparse.Namespace) -> None:
    known = {look.inode: look for look in before}
    rated = [(look, rates(known.get(look.inode, look), look)) for look in after]
    if arguments.json:
        values = [_value(look, rate) for look, rate in rated]
        print(json.dumps(values, indent=None if arguments.watch else 2), flush=True)
        return
    text = "\n".join(_described(rated))
    print(_CLEAR + text if arguments.watch and sys.stdout.isatty() else text, flush=True)


def rates(before: OutboxLook, after: OutboxLook) -> Rates:
    """What happened between two looks at one outbox, per second."""
    elapsed_s = after.at_s - before.at_s

    def per_s(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / elapsed_s if elapsed_s > 0 else 0.0

    return Rates(
        batches_per_s=per_s("committed"),
        rows_per_s=per_s("committed_rows"),
        bytes_per_s=per_s("committed_bytes"),
        blocked_share=min(1.0, per_s("blocked_s")),
    )


def _value(look: OutboxLook, rate: Rates) -> dict[str, Any]:
    schema = look.schema
    numbers = {name: value for name, value in asdict(look).items() if name not in ("schema", "at_s")}
    return {
        "channel": schema.name,
        "fields": [str(field) for field in schema.fields],
        "row_bytes": schema.row_bytes,
        **numbers,
        **asdict(rate),
    }


def _described(rated: Sequence[tuple[OutboxLook, Rates]]) -> list[str]:
    if not rated:
        return ["No channel of yours is live on this machine: training and serving open them while they run."]
    lines: list[str] = []
    for schema, group in groupby(rated, key=lambda one: one[0].schema):
        members = list(group)
        fields = ", ".join(map(str, schema.fields))
        lines += [f"channel {schema.name}: {fields}; {schema.row_bytes:,} bytes a row"]
        lines += [f"  {line}" for line in table([_HEADS, *(_row(*one) for one in members)])]
    return lines


def _row(look: OutboxLook, rate: Rates) -> tuple[str, ...]:
    return (
        str(look.producer),
        str(look.pid) if look.alive else f"{look.pid} (ended)",
        f"{look.committed:,}",
        f"{rate.batches_per_s:.1f}",
        f"{rate.bytes_per_s / 1e6:.1f}",
        str(look.version),
        f"{look.in_use}/{look.slots}",
        f"{rate.blocked_share:.0%}",
        str(look.reposted),
        "; ".join(map(_consumer, look.consumers)) or "none",
    )


def _consumer(look: ConsumerLook) -> str:
    held = f"{look.pid}: {look.backlog} ({look.backlog - look.untaken} taken), lag {look.lag}"
    return held if look.found else f"{held}, not found"
