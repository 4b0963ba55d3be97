"""Several sessions of one process on the Ray that the first of them started."""

import os
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray import cloudpickle
from ray._private import worker
from ray._private.worker import global_worker

from actors.errors import GmiLostError
from actors.protocols import IterationResult
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.session import Session

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


def session(factory=None):
    spec = RunSpec(gmi=GmiSpec(num_gmis=1, threads_per_gmi=1, num_envs=1))
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


def commands_with(text):
    """Command lines of this machine's processes in which it occurs."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                yield command


def test_a_ray_that_was_started_here_follows_no_output_that_nobody_reads():
    with connected():
        session = Path(global_worker.node.get_session_dir_path()).name
        commands = list(commands_with(session))
    assert any("raylet" in command for command in commands)
    assert not [command for command in commands if "log_monitor" in command]


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
