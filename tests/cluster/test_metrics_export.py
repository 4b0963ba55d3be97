"""Metrics of a GMI as Prometheus reads them from Ray."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request

import pytest
import ray

from actors.protocols import IterationResult
from rayagi.monitoring.ray_metrics import Exporter

pytestmark = pytest.mark.cluster
TIMEOUT_S = 90.0
TAGS = {"run": "test-run", "task": "Ant-v5", "gmi": "3", "slice": "cpu[0]"}


@ray.remote
class ExportingActor:
    def __init__(self):
        self.exporter = Exporter(TAGS)

    def iterate(self, iteration):
        metrics = {"env_steps": 128.0, "episodes": 0.0, "value_loss": 0.5}
        self.exporter.export(IterationResult(iteration=iteration, metrics=metrics, episode_returns=[3.0]))


@pytest.fixture
def local_ray():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray.nodes()[0]
    ray.shutdown()


def exported(port, wanted):
    """Lines of the node's export by metric name, once ``wanted`` is among them."""
    deadline = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                lines = [
                    line for line in answer.read().decode().splitlines() if line.startswith("ray_rayagi_")
                ]
        except urllib.error.URLError:
            lines = []
        found = {line.partition("{")[0]: line for line in lines}
        if wanted in found:
            return found
        pause.wait(0.5)
    raise AssertionError(f"{wanted} was not exported within {TIMEOUT_S:.0f} s")


def test_metrics_reach_prometheus_with_the_identity_of_their_gmi(local_ray):
    actor = ExportingActor.remote()
    ray.get([actor.iterate.remote(i) for i in (1, 2)], timeout=60)
    found = exported(local_ray["MetricsExportPort"], "ray_rayagi_env_steps_total")
    assert found["ray_rayagi_env_steps_total"].endswith(" 256.0")
    assert found["ray_rayagi_value_loss"].endswith(" 0.5")
    assert found["ray_rayagi_episode_return"].endswith(" 3.0")
    for line in found.values():
        for key, value in TAGS.items():
            assert f'{key}="{value}"' in line
