"""Several sessions of one process on the Ray that the first of them started."""

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray._private import worker

from actors.errors import GmiLostError
from actors.protocols import IterationResult
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.session import Session
from tests.programs import run_python

pytestmark = pytest.mark.cluster


@dataclass
class Counting:
    """Counts its iterations; is its own factory."""

    iteration: int = 0

    def __call__(self, context):
        return self

    def iterate(self):
        self.iteration += 1
        return IterationResult(iteration=self.iteration, metrics={"env_steps": 1.0})

    def close(self):
        pass


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    # Workers cannot import this file: its classes travel as values.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert not ray.is_initialized()
    yield
    ray.shutdown()


def session(factory=None, threads=1):
    spec = RunSpec(gmi=GmiSpec(num_gmis=1, threads_per_gmi=threads, num_envs=1))
    return Session(spec, factory=factory or Counting())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two sessions need two cores")
@pytest.mark.slow
def test_ray_ends_with_the_last_session_and_not_with_the_one_that_started_it():
    first = session().__enter__()
    with session() as second:
        first.close()
        first.close()
        assert [result.iteration for result in second.train(2)] == [1, 2]
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_ray_that_was_shut_down_meanwhile_and_started_again_is_not_ours():
    with connected():
        ray.shutdown()
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    assert ray.is_initialized()


STARTED = """
from contextlib import suppress
from pathlib import Path
import ray
from rayagi.coordinator.cluster import connected
with connected(dashboard={dashboard}):
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path()).name
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            command = file.read_text(errors="replace").split("\\0")
            if any(session in word for word in command):
                print(*(Path(word).name for word in command[:3]))
"""


@pytest.mark.parametrize("dashboard", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_ray_that_was_started_here_has_no_processes_that_nobody_uses(dashboard):
    """In a process of its own: that of the tests starts every Ray so (conftest.py)."""
    code = STARTED.format(dashboard=dashboard)
    done = run_python(code)
    assert "gcs_server" in done.stdout
    assert "raylet" in done.stdout
    assert ("dashboard.py" in done.stdout) == dashboard
    assert "monitor.py" not in done.stdout  # neither monitor.py, the autoscaler, nor log_monitor.py


def test_processes_of_a_ray_that_was_started_here_wait_milliseconds_for_each_others_sockets():
    """By default a raylet waits a second if its object store does not listen yet."""
    with connected():
        config = ray._private.state.state.get_system_config()
    each_ms = config["raylet_client_connect_timeout_milliseconds"]
    assert each_ms <= 50
    assert each_ms * config["raylet_client_num_connect_attempts"] == 10_000  # as by default


class Environment(Counting):
    """Says which variables its process was started with, and which of them Ray prepared for this GMI alone."""

    def gmi_run(self):
        begun = dict(pair.split("=", 1) for pair in Path("/proc/self/environ").read_text().split("\0")[:-1])
        return begun, dict(ray.get_runtime_context().runtime_env.get("env_vars", {}))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a GMI of two threads needs two cores")
def test_gmis_have_their_variables_from_their_start_and_ray_prepares_none_for_those_it_was_started_for():
    first = session(Environment()).__enter__()
    with connected():
        begun, prepared = first.run()[0]
        assert begun.items() >= first.plan.slices[0].environment.items()
        assert prepared == {}
        first.close()
        with session(Environment(), threads=2) as second:
            begun, prepared = second.run()[0]
            assert begun.items() >= second.plan.slices[0].environment.items()
            assert prepared["OMP_NUM_THREADS"] == "2"


class Dying(Counting):
    """Its process ends in its first iteration."""

    def iterate(self):
        os._exit(1)


def test_ray_says_nothing_of_a_gmi_that_died_before_the_error_does(capfd, monkeypatch):
    show, shown = worker.print_to_stdstream, threading.Event()

    def observed(*arguments, **options):
        show(*arguments, **options)
        shown.set()

    monkeypatch.setattr(worker, "print_to_stdstream", observed)
    with connected():
        own = session(Dying())
        with own, pytest.raises(GmiLostError) as caught:
            own.train(1)
        assert shown.wait(30)  # Ray's report of the death
    assert "\n" not in str(caught.value)
    assert "common causes" not in str(caught.value)
    assert worker._worker_logs_enabled
    assert capfd.readouterr() == ("", "")
