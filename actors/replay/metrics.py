"""What a store has done and holds: counters, histograms, bytes, rate limiter; and an interval of it by flat names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from actors.replay.kernel import BINS
from actors.replay.limiter import LimiterStatus
from actors.replay.tree import Integers

if TYPE_CHECKING:
    from actors.replay.shards import ReplayShards
    from actors.replay.store import ReplayStore

EXAMINED_ROWS = 2**12
"""Most rows whose times sampled are read for a histogram; of a larger store, evenly spaced ones."""


class Histogram(NamedTuple):
    """Counts by powers of two. Bin 0: values of at most 0; bin b: 2**(b - 1) to 2**b - 1.

    Attributes:
        counts: (BINS,)
    """

    counts: Integers

    @property
    def total(self) -> int:
        """Number of values."""
        return int(self.counts.sum())

    def quantile(self, share: float) -> float:
        """Value that this share of all values does not exceed, to the width of its bin; 0 without values."""
        if not self.total:
            return 0.0
        ends = np.cumsum(self.counts)
        wanted = share * ends[-1]
        at = min(int(np.searchsorted(ends, wanted)), int(np.flatnonzero(self.counts)[-1]))
        if at == 0:
            return 0.0
        below = float(ends[at] - self.counts[at])
        # Evenly spread within the bin, from 2**(at - 1) on.
        return float(2.0 ** (at - 1) * (1 + max(0.0, wanted - below) / float(self.counts[at])))

    def since(self, before: Self) -> Histogram:
        """What was added since."""
        return Histogram(np.maximum(0, self.counts - before.counts))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayMetrics:
    """A store, or a table of several shards, at one moment. Counts are since each shard was created."""

    loads: Mapping[int, int]
    """Rows drawn from each shard, replacement included."""
    capacity: int
    rows: int
    """That can be selected."""
    inserts: int
    samples: int
    """Rows drawn, replacement included."""
    evictions: int
    deletions: int
    reclaimed: int
    """Rows of writers that ended before they committed them."""
    ages: Histogram
    """Of drawn rows: nanoseconds from timestamp to draw. Means something if timestamps are the default ones."""
    staleness: Histogram
    """Of drawn rows: rows drawn from their shard between their insertion and the draw."""
    times_sampled: Histogram
    """Of rows that can be selected now: how often they have been drawn."""
    memory_bytes: int
    """Of files in memory: status table, trees, and blocks unless they are on disk."""
    mapped_bytes: int
    """Of blocks in a memory-mapped file in a folder."""
    spilled_rows: int
    spilled_bytes: int
    """Of rows that are in the file only, because the budget has no space for them."""
    limiter: LimiterStatus

    def to_message(self) -> dict[str, Any]:
        """As numbers, texts and arrays."""
        return {
            **{name: getattr(self, name) for name in _COUNTS},
            **{name: getattr(self, name).counts for name in _HISTOGRAMS},
            "loads": list(self.loads.items()),
            "limiter": self.limiter.to_message(),
        }

    @classmethod
    def from_message(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of ``to_message``."""
        found: dict[str, Any] = {name: int(values[name]) for name in _COUNTS}
        found |= {name: histogram_of(values[name]) for name in _HISTOGRAMS}
        loads = {int(shard): int(load) for shard, load in values["loads"]}
        return cls(**found, loads=loads, limiter=LimiterStatus.from_message(values["limiter"]))

    @classmethod
    def merged(cls, shards: Sequence[Self]) -> Self:
        """Of a table with these shards."""
        zeros = np.zeros(BINS, np.int64)
        found: dict[str, Any] = {name: sum(getattr(shard, name) for shard in shards) for name in _COUNTS}
        for name in _HISTOGRAMS:
            found[name] = Histogram(sum((getattr(shard, name).counts for shard in shards), zeros))
        loads = {shard: load for each in shards for shard, load in each.loads.items()}
        return cls(**found, loads=loads, limiter=LimiterStatus.merged([shard.limiter for shard in shards]))


_HISTOGRAMS = ("ages", "staleness", "times_sampled")
_COUNTS = tuple(
    found.name for found in fields(ReplayMetrics) if found.name not in (*_HISTOGRAMS, "loads", "limiter")
)


class ReplayMeter:
    """Metrics of a store by the names of rayagi's catalogue, counters and histograms for the time between two calls."""

    def __init__(self, store: ReplayStore | ReplayShards) -> None:
        """Begin the first interval."""
        self._store, self._before = store, store.metrics()
        self.histograms: dict[str, list[int]] = {}
        """Counts of the last interval by names of the catalogue; ages in nanoseconds."""

    def values(self) -> dict[str, float]:
        """Metrics of the interval that ends now."""
        now, before = self._store.metrics(), self._before
        self._before = now
        ages, staleness = now.ages.since(before.ages), now.staleness.since(before.staleness)
        histograms = {
            "replay_age": ages,
            "replay_staleness": staleness,
            "replay_times_sampled": now.times_sampled,
        }
        self.histograms = {name: found.counts.tolist() for name, found in histograms.items() if found.total}
        found: dict[str, float] = {
            "replay_inserts": _since(now.inserts, before.inserts),
            "replay_samples": _since(now.samples, before.samples),
            "replay_evictions": _since(now.evictions, before.evictions),
            "replay_rows": now.rows,
            "replay_memory_bytes": now.memory_bytes,
            "replay_disk_bytes": now.mapped_bytes + now.spilled_bytes,
            "replay_shard_samples": max(
                (_since(load, before.loads.get(shard, 0)) for shard, load in now.loads.items()), default=0
            ),
            "replay_times_sampled_p50": now.times_sampled.quantile(0.5),
            "replay_times_sampled_p95": now.times_sampled.quantile(0.95),
        }
        if ages.total:
            found |= {
                "replay_age_p50_s": ages.quantile(0.5) / 1e9,
                "replay_age_p95_s": ages.quantile(0.95) / 1e9,
                "replay_staleness_p50": staleness.quantile(0.5),
                "replay_staleness_p95": staleness.quantile(0.95),
            }
        if now.limiter.limit is not None:
            waited, earlier = now.limiter.waited_s, before.limiter.waited_s
            found |= {
                "replay_limiter_error": now.limiter.error,
                "replay_waiting": len(now.limiter.waiting),
                "replay_insert_wait_s": _since(waited["insert"], earlier["insert"]),
                "replay_sample_wait_s": _since(waited["sample"], earlier["sample"]),
            }
        return {name: float(value) for name, value in found.items()}


def _since(now: float, before: float) -> float:
    """Growth of a counter; 0 if it fell, since a shard was lost."""
    return max(0, now - before)


def histogram_of(counts: object) -> Histogram:
    """A copy of BINS counts of the kernel's."""
    return Histogram(np.array(counts, np.int64).reshape(BINS))
