"""``rayagi replay info``: shows what a dataset or a saved replay holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from placement.errors import counted
from placement.text import aligned
from rayagi.cli.replay_progress import shown_progress
from rayagi.replay.loading import open_source
from rayagi.replay.summary import summarize
from rayagi.run.quantities import bytes_text


def run(arguments: argparse.Namespace) -> int:
    """Print it; returns the exit code.

    Raises:
        DatasetError: it is of no known format, empty or damaged, or lacks a column.
    """
    source = open_source(arguments.path, columns=arguments.columns, mask=arguments.mask)
    with shown_progress(f"reading {arguments.path}") as progress:
        found = summarize(source, progress)
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_described(found)))
    return 0


def _described(found: dict[str, Any]) -> list[str]:
    ends = ", ".join(f"{count:,} {end}" for end, count in found["ends"].items() if count)
    rows = [("column", "type", "shape", "steps", "not finite")]
    rows += [
        (
            column["name"],
            column["type"],
            str(column["shape"]),
            "L + 1" if column["extra_steps"] else "L",
            f"{column['not_finite']:,}",
        )
        for column in found["columns"]
    ]
    lines = [
        f"{found['path']}: {found['format']}, {counted(found['trajectories'], 'trajectory', 'trajectories')}, "
        f"{counted(found['steps'], 'step')}; {ends}",
        f"  lengths  {_spread(found['lengths'])}",
        f"  returns  {_spread(found['returns'])}",
        f"  values   {bytes_text(found['bytes'])}; {bytes_text(found['store_bytes'])} as a replay of rows of the longest",
        *(f"  {line}" for line in aligned(rows, right=(4,))),
    ]
    if found["left_out"]:
        lines.append(
            f"  not read: {', '.join(found['left_out'])} (--columns NAME reads those that have numbers)"
        )
    return lines


def _spread(spread: dict[str, float | None]) -> str:
    """``1 to 1000, mean 412.5``."""
    if spread["min"] is None or spread["mean"] is None or spread["max"] is None:
        return "none, or not finite"
    return f"{spread['min']:,.6g} to {spread['max']:,.6g}, mean {spread['mean']:,.6g}"
