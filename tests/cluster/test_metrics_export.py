"""A run's metrics as Prometheus reads them from Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from rayagi import PPOConfig
from rayagi.monitoring.catalogue import CATALOGUE, DERIVED
from tests.fakes.metrics import OF_OTHERS
from tests.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("default_signals")]
TIMEOUT_S = 90.0
TASK = "InvertedPendulum-v5"
NOT_MEASURED = {"evaluation_return_mean"}
"""Without evaluations."""


@pytest.fixture(scope="module")
def metrics_port():
    """Where a local Ray exports metrics; it asks its workers for them twice a second, by default every ten seconds."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 500},
    )
    # The default of a new local Ray: GMIs export, and Prometheus reads, where everything else needs the token.
    assert os.environ["RAY_AUTH_MODE"] == "token"
    yield ray.nodes()[0]["MetricsExportPort"]
    ray.shutdown()


def rayagi(folder, *arguments):
    """A command that finds the test's Ray as it would any cluster."""
    variables = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "rayagi", *arguments],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def exported(port, run, wanted):
    """Tags by name and GMI of what the node exports of a run, once every (name, GMI) that is ``wanted`` is among them."""
    deadline = time.monotonic() + TIMEOUT_S
    pause = threading.Event()
    found = {}
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except (urllib.error.URLError, TimeoutError):
            lines = []
        for line in lines:
            if line.startswith("ray_rayagi_"):
                tags = dict(re.findall(r'(\w+)="([^"]*)"', line))
                if tags["run"] == run:
                    found[line.partition("{")[0], tags["gmi"]] = tags
        if wanted <= found.keys():
            return found
        pause.wait(0.5)
    raise AssertionError(f"not exported within {TIMEOUT_S:.0f} s: {sorted(wanted - found.keys())}")


def assert_nothing_is_held():
    """No actor, placement group or CPU of the run that Ctrl-C ended: the cluster goes on without it."""
    until(lambda: ray.available_resources().get("CPU") == 2.0)
    assert {actor["State"] for actor in ray._private.state.actors().values()} <= {"DEAD"}
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def test_a_runs_metrics_reach_prometheus_for_each_gmi_and_for_all(metrics_port, tmp_path):
    suffix = {"counter": "_total", "gauge": ""}
    wanted = {
        (f"ray_rayagi_{metric.name}{suffix[metric.kind]}", gmi)
        for metric in CATALOGUE
        if metric.name not in {*OF_OTHERS, "faults_unstable"}  # a counter is exported from its first count on
        for gmi in "01"
    }
    wanted |= {
        (f"ray_rayagi_run_{metric.name}", "all") for metric in DERIVED if metric.name not in NOT_MEASURED
    }
    options = ["--gmis", "2", "--num-envs", "8", "--time", "10m", "--name", "exported"]
    process = rayagi(tmp_path, "train", TASK, *options)
    try:
        found = exported(metrics_port, "exported", wanted)
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, output
    assert_nothing_is_held()
    assert found.keys() == wanted
    assert {(tags["run"], tags["task"]) for tags in found.values()} == {("exported", TASK)}
    assert {tags["slice"] for (_, gmi), tags in found.items() if gmi == "all"} == {"all"}


@pytest.mark.slow
def test_rllibs_face_exports_each_gmi_and_the_run_too(metrics_port, capsys):
    config = (
        PPOConfig()
        .environment(TASK)
        .gmi(num_gmis=1, num_envs=8, threads_per_gmi=1)
        .training(rollout_length=32, num_minibatches=2, num_epochs=1)
    )
    wanted = {
        (f"ray_rayagi_run_{metric.name}", "all") for metric in DERIVED if metric.name not in NOT_MEASURED
    }
    algo = config.build_algo()
    try:
        for _ in range(3):
            row = algo.train()["rayagi"]
        found = exported(metrics_port, TASK, wanted | {("ray_rayagi_value_loss", "0")})
    finally:
        algo.stop()
    assert wanted <= found.keys()
    assert row["env_steps_total"] == 3 * 8 * 32
    printed = capsys.readouterr().out
    assert f"{TASK}: " in printed
    assert (
        "no prediction: this plan was not measured here; `rayagi search InvertedPendulum-v5` does" in printed
    )


@pytest.mark.slow
def test_a_plan_is_the_clusters_where_there_is_one(metrics_port, tmp_path):
    output, _ = rayagi(tmp_path, "plan", TASK, "--gmis", "3").communicate(timeout=TIMEOUT_S)
    assert "num_gmis=3" in output
    ray.shutdown()
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    output, _ = rayagi(tmp_path, "plan", TASK).communicate(timeout=TIMEOUT_S)
    assert "1 GMI," in output
