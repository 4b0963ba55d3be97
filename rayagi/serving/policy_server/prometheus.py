"""Counters of the policy server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rayagi.serving.latency import Latencies
from rayagi.serving.policy_server.batching import ServerStatistics

_BOUNDS_S = tuple(step * 10.0**power for power in range(-4, 2) for step in (1, 2.5, 5))
"""Upper bounds of a histogram's buckets: 100 us to 50 s."""


@dataclass(frozen=True, slots=True)
class PolicyMetrics(Collector):
    """A server's statistics at this moment, and the version of its policy."""

    statistics: ServerStatistics
    version: int

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' client asks for it."""
        now = self.statistics
        for name, text, value in (
            ("requests", "Requests answered with actions", now.requests),
            ("rows", "Observations of these requests", now.rows),
            ("batches", "Inferences", now.batches),
            ("refused", "Requests answered with an error", now.refused),
        ):
            yield CounterMetricFamily(f"rayagi_policy_{name}", text, value=value)
        yield GaugeMetricFamily("rayagi_policy_version", "Version of the policy", value=self.version)
        yield _histogram("latency", "From a request's first byte to its answer", now.latency)
        yield _histogram("inference", "Of one batch", now.inference)


def _histogram(name: str, text: str, latencies: Latencies) -> HistogramMetricFamily:
    buckets = [(f"{bound:g}", float(latencies.count_up_to(bound))) for bound in _BOUNDS_S]
    buckets.append(("+Inf", float(latencies.count)))
    return HistogramMetricFamily(
        f"rayagi_policy_{name}_seconds", text, buckets=buckets, sum_value=latencies.total_s
    )
