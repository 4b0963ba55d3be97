"""Latency histogram with logarithmic buckets. Histograms of several GMIs merge; percentiles are accurate to 1 %."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_LEAST_S, _GROWTH = 1e-6, 1.02
"""Bucket 0 holds everything up to 1 us; each further bucket is 2 % wider than the one before."""
_LOG_GROWTH = math.log(_GROWTH)


@dataclass(slots=True)
class Latencies:
    """A histogram of durations, in a few kilobytes at most."""

    counts: dict[int, int] = field(default_factory=dict)
    """Counts by bucket: bucket ``k`` holds durations up to 1 us x 1.02^k."""
    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Add one duration."""
        # bucket k = ceil(log(t / 1 us) / log 1.02), so that 1 us x 1.02^(k-1) < t <= 1 us x 1.02^k.
        bucket = 0 if seconds <= _LEAST_S else math.ceil(math.log(seconds / _LEAST_S) / _LOG_GROWTH)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.count += 1
        self.total_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Latencies) -> None:
        """Add another histogram."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.count += other.count
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)

    def count_up_to(self, seconds: float) -> int:
        """How many durations were not longer, to the accuracy of a bucket."""
        return sum(count for bucket, count in self.counts.items() if _LEAST_S * _GROWTH**bucket <= seconds)

    def percentile(self, share: float) -> float | None:
        """The duration in seconds that a share (0 to 1) did not exceed; None without data.

        Nearest-rank percentile, as the geometric middle of its bucket.
        """
        if self.count == 0:
            return None
        rank, cumulated = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self.counts):
            cumulated += self.counts[bucket]
            if cumulated >= rank:
                break
        return (
            min(self.longest_s, _LEAST_S * _GROWTH ** (bucket - 0.5))
            if bucket
            else min(self.longest_s, _LEAST_S)
        )

    @property
    def mean_s(self) -> float | None:
        """Mean in seconds; None without data."""
        return self.total_s / self.count if self.count else None

    def to_dict(self) -> dict[str, float | int | None]:
        """Count, mean, percentiles and maximum, in milliseconds."""

        def milliseconds(seconds: float | None) -> float | None:
            return None if seconds is None else round(1e3 * seconds, 4)

        return {
            "count": self.count,
            "mean_ms": milliseconds(self.mean_s),
            "p50_ms": milliseconds(self.percentile(0.50)),
            "p90_ms": milliseconds(self.percentile(0.90)),
            "p99_ms": milliseconds(self.percentile(0.99)),
            "max_ms": milliseconds(self.longest_s) if self.count else None,
        }

    def text(self) -> str:
        """For people: ``p50 1.2 ms, p90 1.4 ms, p99 2.0 ms``."""
        if self.count == 0:
            return "-"
        return ", ".join(
            f"p{share} {1e3 * (self.percentile(share / 100) or 0.0):.3g} ms" for share in (50, 90, 99)
        )
