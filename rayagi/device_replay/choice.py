"""Which way batches reach a device: measured on the device, with the store's own rows, before the first batch."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Protocol

import numpy as np
import torch

from actors.replay import Keys, ReplayError, ReplayStore, Selection, Subscription, kernel
from actors.replay.shards import ReplayShards
from rayagi.device_replay.buffers import CopyGatherer, DeviceBatch, UnavailableError

_logger = logging.getLogger(__name__)
_SELECTIONS, _TURNS = 4, 5
"""Of the measurement: batches of a turn, and turns of each way, after one that is not counted."""


class BatchGatherer(Protocol):
    """One way."""

    def __call__(self, selection: Selection, /) -> DeviceBatch:
        """The windows of these n rows."""

    def close(self) -> None:
        """Release memory."""


Way = Callable[[ReplayStore | ReplayShards, Sequence[Subscription], int, torch.device], BatchGatherer]


def _by_warp(module: str, name: str) -> Way:
    """A way whose kernels are Warp's, in a module that needs it."""

    def make(
        store: ReplayStore | ReplayShards, subscriptions: Sequence[Subscription], n: int, device: torch.device
    ) -> BatchGatherer:
        try:
            gatherer = getattr(importlib.import_module(f"rayagi.device_replay.{module}"), name)
        except ImportError as error:
            raise UnavailableError(f"Warp is not installed ({error}): pip install 'rayagi[gpu]'") from error
        try:
            made: BatchGatherer = gatherer(store, subscriptions, n, device)
        except ReplayError:
            raise
        except Exception as error:  # Warp has no exception type of its own
            raise UnavailableError(f"Warp cannot compile or load its kernels: {error}") from error
        return made

    return make


WAYS: Mapping[str, Way] = {
    "copy": CopyGatherer,
    "zero-copy": _by_warp("zero_copy", "ZeroCopyGatherer"),
    "mirror": _by_warp("mirror", "MirrorGatherer"),
}
"""By name; the first is always available.

copy: the CPU gathers into page-locked memory, which is copied. zero-copy: the device reads the store's page-locked memory.
mirror: the device keeps the rows that were selected once.
"""


class DeviceGatherer:
    """Windows of n selected rows on a device, again and again, in the way that is the fastest there.

    Attributes:
        way: name of ``WAYS``; empty before the first batch
    """

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        subscriptions: Sequence[Subscription],
        n: int,
        device: torch.device,
    ) -> None:
        """Arguments as of ``Gatherer``; ``device``: of the batches. Raises ReplayError: an unknown column."""
        self._store, self._subscriptions, self._n, self._device = store, tuple(subscriptions), n, device
        self.way = ""
        self._copy: BatchGatherer = CopyGatherer(store, subscriptions, n, device)
        self._gatherer: BatchGatherer | None = None

    def __call__(self, selection: Selection) -> DeviceBatch:
        """The windows of these n rows. The first call measures.

        Raises:
            ReplayError: another number of rows, a row of another shard, or a timestep that its trajectory does not have.
        """
        if self._gatherer is None:
            if isinstance(self._store, ReplayStore) and not len(self._store):
                return self._copy(selection)  # of rows that are gone: there is nothing to measure with
            self._gatherer = self._chosen()
        return self._gatherer(selection)

    def _chosen(self) -> BatchGatherer:
        """The fastest way; the others release their memory. Logs all, with the reasons why some are not available."""
        ways: dict[str, BatchGatherer] = {"copy": self._copy}
        notes = []
        for name in list(WAYS)[1:]:
            try:
                ways[name] = WAYS[name](self._store, self._subscriptions, self._n, self._device)
            except UnavailableError as error:
                notes.append(f"{name} is not available: {error}")
        if len(ways) > 1:
            assert isinstance(self._store, ReplayStore)
            times = measure(ways, _random_selections(self._store, self._n), self._device)
            notes.extend(f"{name} takes {1e6 * seconds:.0f} us" for name, seconds in times.items())
            self.way = min(times, key=lambda name: times[name])
        else:
            self.way = "copy"
        _logger.info(
            "replay batches of %d rows to %s by %s: %s", self._n, self._device, self.way, "; ".join(notes)
        )
        for name, gatherer in ways.items():
            if name != self.way:
                gatherer.close()
        return ways[self.way]

    def close(self) -> None:
        """Release memory. Safe to call twice."""
        if self._gatherer is not None:
            self._gatherer.close()


def measure(
    ways: Mapping[str, BatchGatherer], selections: Sequence[Selection], device: torch.device
) -> dict[str, float]:
    """Seconds of a batch on the device by each way, in turns: medians. The mirror has the rows, as in a long run."""
    turns: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_TURNS + 1):
        for name, gatherer in ways.items():
            begin = time.perf_counter()
            for selection in selections:
                gatherer(selection)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                turns[name].append((time.perf_counter() - begin) / len(selections))
    return {name: median(times) for name, times in turns.items()}


def _random_selections(store: ReplayStore, n: int) -> list[Selection]:
    """Uniform first timesteps of the rows that are committed, which are not counted as selected."""
    status = store.status()
    rows = status[status["state"] == kernel.COMMITTED]
    rng, ones = np.random.default_rng(0), np.ones(n)
    found = []
    for _ in range(_SELECTIONS):
        chosen = rows[rng.integers(0, len(rows), n)]
        keys = Keys(chosen["index"].copy(), chosen["generation"].copy())
        found.append(Selection(keys, np.zeros(n, np.int64), ones, ones.astype(np.float32)))
    return found
