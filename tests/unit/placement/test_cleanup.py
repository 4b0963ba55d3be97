"""Cleanup of the state that a killed driver leaves."""

import json
import os
import signal
import subprocess
import sys

import pytest

from placement.errors import PartitionError
from placement.ledger import Ledger, all_ledgers
from placement.partitioner import Partitioner, recover_stale_state, recover_this_host, stale_ledgers
from rayagi.cli import main
from tests.fakes.mps import NOTHING, ROOT, gpu, surroundings

DRIVER = """
import os, signal, sys
from pathlib import Path
from placement.backends import mps, mps_control
from placement.partitioner import Partitioner
from placement.ledger import Ledger
from tests.fakes.mps import gpu

mps.FOLDERS, kill_at = Path(sys.argv[1]), int(sys.argv[3])
steps = iter(range(1000))

def counted(step):
    def call(*arguments, **options):
        if next(steps) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments, **options)
    return call

Ledger._write, mps_control._run = counted(Ledger._write), counted(mps_control._run)
Partitioner("mps", "Ant-v5", Path(sys.argv[2])).partition([(gpu("GPU-1"), (0.5, 0.5)), (gpu("GPU-2"), (1.0,))])
print("partitioned", flush=True)
signal.pause()
"""


@pytest.fixture
def place(monkeypatch):
    with surroundings(monkeypatch) as found:
        monkeypatch.setenv("XDG_CACHE_HOME", str(found.folders.parent / "cache"))
        found.ledgers = found.folders.parent / "cache" / "rayagi" / "ledgers"
        yield found


def start_driver(place, kill_at=-1):
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(place.folders), str(place.ledgers), str(kill_at)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def killed_driver(place):
    """A driver that partitioned two GPUs and was then killed."""
    with start_driver(place) as driver:
        assert driver.stdout.readline() == "partitioned\n"
        assert stale_ledgers() == []  # it lives
        driver.kill()
    return driver.pid


def test_cleanup_undoes_what_a_killed_driver_left(place, killed_driver, capsys):
    assert len(place.daemons()) == 2
    assert main(["cleanup", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"Run Ant-v5, process {killed_driver} on " in said
    assert "mps daemon on GPU-1" in said
    assert "mps folder on GPU-2" in said
    assert "1 ended run left something behind" in said
    assert len(place.daemons()) == 2
    assert main(["cleanup"]) == 0
    assert f"Undone: what process {killed_driver} of run Ant-v5 left." in capsys.readouterr().out
    assert place.left() == NOTHING
    assert main(["cleanup"]) == 0
    assert capsys.readouterr().out == "Nothing was left behind.\n"


def test_cleanup_leaves_the_living_alone(place, capsys):
    partitioner = Partitioner("mps", "Humanoid-v5")
    partitioner.partition([(gpu(), (0.5,))])
    assert main(["cleanup"]) == 0
    assert f"process {os.getpid()} on " in capsys.readouterr().out
    assert place.daemons()[0].servers()
    partitioner.restore()
    partitioner.restore()
    assert place.left() == NOTHING


def test_what_cannot_be_undone_stays_in_the_ledger_and_fails_the_command(
    place, killed_driver, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        patch.setattr("placement.backends.mps_control.MpsDaemon.end", _cannot)
        assert main(["cleanup"]) == 1
    assert "does not end. Kill it as root" in capsys.readouterr().err
    (ledger,) = stale_ledgers()
    assert [step.made for step in ledger.steps()] == ["daemon", "folder"] * 2
    assert recover_stale_state(ledger) == []
    assert place.left() == NOTHING


def _cannot(daemon):
    raise PartitionError(str(daemon.pipe), "does not end", "Kill it as root")


def test_the_next_run_on_the_gpu_recovers_stale_state_first(place, killed_driver):
    partitioner = Partitioner("mps", "next")
    partitioner.partition([(gpu("GPU-1"), (1.0,))])
    (ledger,) = all_ledgers()[0]
    assert ledger.run == "next"
    assert len(place.daemons()) == 1
    partitioner.restore()
    assert place.left() == NOTHING


@pytest.mark.parametrize("kill_at", [0, 1, 2, 3, 5, 8, 11])
def test_a_driver_killed_at_any_step_can_be_cleaned_up(place, kill_at):
    with start_driver(place, kill_at) as driver:
        assert driver.wait(60) == -signal.SIGKILL
    for ledger in stale_ledgers():
        assert recover_stale_state(ledger) == []
    assert place.left() == NOTHING


def test_a_failure_on_the_second_gpu_undoes_the_first(place, monkeypatch):
    real = Ledger.record

    def record(ledger, backend, gpu_uuid, made, undo=None):
        if gpu_uuid == "GPU-2" and made == "daemon":
            raise PartitionError("the ledger", "could not be written", "Make room")
        return real(ledger, backend, gpu_uuid, made, undo)

    monkeypatch.setattr(Ledger, "record", record)
    partitioner = Partitioner("mps", "run")
    with pytest.raises(PartitionError, match="could not be written"):
        partitioner.partition([(gpu("GPU-1"), (0.5,)), (gpu("GPU-2"), (0.5,))])
    assert place.left() == NOTHING


def test_instances_of_before_the_host_was_restarted_are_not_touched(place, monkeypatch):
    """They ended with it: what is in their places, with the same numbers, is somebody else's."""
    of_killed = Ledger.open("Ant-v5", place.ledgers)
    where = {"profile_id": 9, "start": 0, "size": 4, "instance_id": 1, "uuid": "MIG-of-the-run"}
    of_killed.record("mig", "GPU-1", "gpu_instance", where)
    content = json.loads(of_killed.path.read_text())
    content["owner"]["boot_id"] = "before the last boot"
    of_killed.path.write_text(json.dumps(content))

    def touched(*arguments):
        raise AssertionError("the driver was asked")

    monkeypatch.setattr("placement.backends.mig.mig_gpu", touched)
    (stale,) = stale_ledgers(place.ledgers)
    assert recover_stale_state(stale) == []
    assert not of_killed.path.exists()


def test_a_run_is_planned_after_what_killed_ones_left_is_undone(place, killed_driver):
    recover_this_host(place.ledgers)
    assert stale_ledgers(place.ledgers) == []
    assert place.left() == NOTHING
