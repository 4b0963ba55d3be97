"""``rayagi replay bench``: measures selecting and copying batches beside memcpy."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from actors.replay import Column, Gatherer, ReplaySchema, ReplayStore, Subscription, SubSequences, select
from placement.errors import counted
from rayagi.cli.failures import UsageError
from rayagi.cli.replay_progress import check_batch, loaded

_ROWS = 100_000
"""Of the table that is measured without a dataset, in trajectories of 100 steps."""
_COLD_BYTES = 2**27
"""Of memcpy's source: larger than caches."""
_TURNS = 8


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        DatasetError: the dataset cannot be read.
        ReplayError: it does not fit into --memory, or no trajectory has --length steps.
    """
    selector = SubSequences(arguments.length)
    with loaded(arguments, (selector,)) if arguments.path else _synthetic(selector) as store:
        found = _measured(store, selector, arguments)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    print(
        f"{found['samples_per_s']:,.0f} samples/s of {found['sample_bytes']:,} bytes, batches of {found['batch']}: "
        f"{found['bytes_per_s'] / 1e9:.2f} GB/s\n"
        f"memcpy {found['memcpy_bytes_per_s'] / 1e9:.2f} GB/s on one thread: ratio {found['ratio']:.2f}\n"
        "The ratio is the median of turns; near 1 memory is the limit, far below it the cost of each row is."
    )
    return 0


def _synthetic(selector: SubSequences) -> ReplayStore:
    """Random steps of Ant's size."""
    shapes = {"obs": (105,), "action": (8,), "reward": ()}
    columns = [
        Column(name=name, dtype=np.float32, shape=shape, extra=int(name == "obs"))
        for name, shape in shapes.items()
    ]
    steps = 100
    store = ReplayStore.create(
        ReplaySchema((*columns, Column(name="terminated", dtype=bool)), steps),
        _ROWS // steps,
        selectors=(selector,),
    )
    rng = np.random.default_rng(0)
    row = {
        name: rng.random((1, steps + int(name == "obs"), *shape), np.float32)
        for name, shape in shapes.items()
    }
    for _ in range(_ROWS // steps):
        store.insert({**row, "terminated": np.zeros((1, steps), bool)})
    return store


def _measured(store: ReplayStore, selector: SubSequences, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates by turns, so that what else the machine does strikes both alike."""
    longest = int(store.status()["length"].max())
    if arguments.length > longest:
        raise UsageError(
            f"--length {arguments.length}: the longest trajectory has {counted(longest, 'step')}"
        )
    check_batch(store, arguments, 4)
    windows = [
        Subscription(column=column.name, length=arguments.length + column.extra)
        for column in store.schema.columns
    ]
    gatherer, draws = Gatherer(store, windows, arguments.batch), count()
    batch_bytes = sum(values.nbytes for values in gatherer.values.values())
    source = np.ones(max(_COLD_BYTES, 2 * batch_bytes), np.uint8)
    target, places = np.empty(batch_bytes, np.uint8), count(step=batch_bytes)

    def sample() -> None:
        gatherer(select(store, selector, arguments.batch, seed=0, draw=next(draws)))

    def copy() -> None:
        begin = next(places) % (len(source) - batch_bytes + 1)
        np.copyto(target, source[begin : begin + batch_bytes])

    for each in (sample, copy):
        each()
    turns = [
        tuple(_rate(each, arguments.time / (2 * _TURNS)) for each in (sample, copy)) for _ in range(_TURNS)
    ]
    batches_per_s, copies_per_s = median(turn[0] for turn in turns), median(turn[1] for turn in turns)
    return {
        "batch": arguments.batch,
        "length": arguments.length,
        "sample_bytes": batch_bytes // arguments.batch,
        "samples_per_s": batches_per_s * arguments.batch,
        "bytes_per_s": batches_per_s * batch_bytes,
        "memcpy_bytes_per_s": copies_per_s * batch_bytes,
        "ratio": median(turn[0] / turn[1] for turn in turns),
    }


def _rate(work: Callable[[], None], time_s: float) -> float:
    """Calls per second."""
    begin, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < time_s or not done:
        work()
        done += 1
    return done / elapsed
