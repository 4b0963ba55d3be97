"""``rayagi replay sample``: selects a batch, and shows its rows and statistics."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from actors.replay import (
    Fifo,
    Lifo,
    Prioritized,
    ReplayStore,
    Subscription,
    SubSequences,
    TopK,
    Uniform,
    WithoutReplacement,
    gather,
    select,
)
from placement.errors import counted
from placement.text import aligned
from rayagi.cli.failures import UsageError
from rayagi.cli.replay_progress import check_batch, loaded
from rayagi.replay.summary import column_statistics

_ROW_BYTES = 2048
"""Of a row's Python objects, about."""
_MADE: dict[str, Callable[[int], Any]] = {
    "uniform": lambda length: Uniform(),
    "sequences": SubSequences,
    "prioritized": lambda length: Prioritized(1.0, 0.4, length),
    "fifo": lambda length: Fifo(),
    "lifo": lambda length: Lifo(),
    "top-k": lambda length: TopK(),
    "without-replacement": lambda length: WithoutReplacement(),
}


def run(arguments: argparse.Namespace) -> int:
    """Print a batch; returns the exit code.

    Raises:
        DatasetError: the dataset cannot be read.
        ReplayError: it does not fit into --memory, or no trajectory has --length steps.
    """
    selector = _MADE[arguments.select](arguments.length)
    with loaded(arguments, (selector,)) as store:
        found = _sampled(store, selector, arguments)
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_described(found, arguments.rows)))
    return 0


def _sampled(store: ReplayStore, selector: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.select in ("fifo", "lifo", "top-k", "without-replacement") and arguments.batch > len(store):
        raise UsageError(
            f"--batch {arguments.batch}: {arguments.select} selects each trajectory once, and there are {len(store):,}"
        )
    longest = int(store.status()["length"].max())
    if arguments.select in ("sequences", "prioritized") and arguments.length > longest:
        raise UsageError(
            f"--length {arguments.length}: the longest trajectory has {counted(longest, 'step')}"
        )
    check_batch(store, arguments, 2, _ROW_BYTES)
    chosen = select(store, selector, arguments.batch, seed=arguments.seed, draw=0)
    windows = [
        Subscription(column=column.name, length=arguments.length + column.extra)
        for column in store.schema.columns
    ]
    batch = gather(store, chosen, windows)
    lengths = store.status()["length"][chosen.keys.indices - store.base]
    return {
        "selector": str(selector),
        "rows": [
            {
                "row": int(chosen.keys.indices[number]),
                "step": int(chosen.steps[number]),
                "of": int(lengths[number]),
                "probability": float(chosen.probabilities[number]),
                "weight": float(chosen.weights[number]),
                "first": {
                    name: np.asarray(values[number][0]).tolist() for name, values in batch.values.items()
                },
            }
            for number in range(len(chosen))
        ],
        "columns": {
            name: column_statistics(values, batch.masks[name]) for name, values in batch.values.items()
        },
    }


def _described(found: dict[str, Any], most: int) -> list[str]:
    heads = [("row", "step", "of", "probability", "weight", "action", "reward")]
    rows = [
        (
            f"{row['row']:,}",
            f"{row['step']:,}",
            f"{row['of']:,}",
            f"{row['probability']:.3g}",
            f"{row['weight']:.3g}",
            _brief(row["first"].get("action", "")),
            _brief(row["first"].get("reward", "")),
        )
        for row in found["rows"][:most]
    ]
    statistics = [("column", "mean", "std", "min", "max")]
    statistics += [
        (name, *("-" if value is None else f"{value:.4g}" for value in values.values()))
        for name, values in found["columns"].items()
    ]
    shown = min(most, len(found["rows"]))
    return [
        f"{found['selector']}: {shown} of {len(found['rows']):,} rows of the batch",
        *(f"  {line}" for line in aligned([*heads, *rows], right=(0, 1, 2, 3, 4))),
        "statistics of the batch's steps",
        *(f"  {line}" for line in aligned(statistics, right=(1, 2, 3, 4))),
    ]


def _brief(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    flat = np.asarray(value).ravel()
    return f"[{', '.join(f'{each:.3g}' for each in flat[:4])}{', ...' if len(flat) > 4 else ''}]"
