"""The ledger of changes to a host's GPUs, and the identity of its owner."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import ledger
from placement.errors import LedgerError, PartitionError
from placement.ledger import Ledger, Owner, all_ledgers, default_directory, exclusive_lock, start_ticks
from placement.partitioner import stale_ledgers
from placement.types import Gpu


def test_a_step_is_on_the_disk_before_it_is_done_and_the_file_goes_with_the_last(tmp_path):
    ledger = Ledger.open("run", tmp_path)
    assert not list(tmp_path.iterdir())
    one = ledger.record("mps", "GPU-1", "folder", {"folder": "/tmp/x"})
    two = ledger.record("mig", "GPU-2", "gpu_instance", {"start": 0})
    two = ledger.amend(two, instance=7)
    read = Ledger.load(ledger.path)
    assert read.steps() == (two, one) == ledger.steps()
    assert two.undo == {"start": 0, "instance": 7}
    assert read.steps("GPU-1") == (one,)
    assert read.steps(backend="mig") == (two,)
    assert read.steps("GPU-1", "mig") == ()
    assert (read.run, read.owner) == ("run", Owner.current())
    ledger.erase(one)
    ledger.erase(one)
    assert Ledger.load(ledger.path).steps() == (two,)
    ledger.erase(two)
    assert not list(tmp_path.iterdir())


names = st.text(min_size=1, max_size=8)
undo = st.dictionaries(names, st.none() | st.text(max_size=20) | st.integers(), max_size=3)


@settings(max_examples=20, deadline=None)  # every step waits for the disk
@given(st.lists(st.tuples(st.sampled_from(["mps", "mig"]), names, names, undo), max_size=6))
def test_what_was_written_is_read(tmp_path_factory, steps):
    ledger = Ledger.open("run", tmp_path_factory.mktemp("ledgers"))
    for step in steps:
        ledger.record(*step)
    if steps:
        assert Ledger.load(ledger.path).steps() == ledger.steps()
    assert [(s.backend, s.gpu_uuid, s.made, s.undo) for s in reversed(ledger.steps())] == steps


def test_a_disk_that_takes_nothing_stops_the_step_and_changes_nothing(tmp_path, monkeypatch):
    ledger = Ledger.open("run", tmp_path)
    one = ledger.record("mps", "GPU-1", "folder")
    before = ledger.path.read_text()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PartitionError, match=r"could not be written \(No space left on device\)"):
        ledger.record("mps", "GPU-1", "daemon")
    assert ledger.steps() == (one,)
    assert ledger.path.read_text() == before
    assert [path.name for path in tmp_path.glob("*.[jt]*")] == [ledger.path.name]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a ledger"),
        ("[]", "is not a ledger"),
        ('{"schema": 1}', "is not a ledger"),
        ('{"schema": 99}', "has schema 99"),
    ],
)
def test_a_file_that_is_no_ledger_is_named_and_the_others_are_read(tmp_path, text, problem):
    good = Ledger.open("run", tmp_path)
    good.record("mps", "GPU-1", "folder")
    (tmp_path / "bad.json").write_text(text)
    ledgers, (error,) = all_ledgers(tmp_path)
    assert [ledger.path for ledger in ledgers] == [good.path]
    assert isinstance(error, LedgerError)
    assert problem in str(error)
    assert "bad.json" in str(error)


def test_a_process_is_alive_until_it_ends_and_a_later_one_of_its_number_is_another():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(Owner.current(), pid=process.pid, start_ticks=start_ticks(process.pid))
    assert owner.state() == "alive"
    assert replace(owner, start_ticks=owner.start_ticks - 1).state() == "dead"  # the pid was reused
    assert replace(owner, boot_id="before the last boot").state() == "dead"
    assert replace(owner, host="elsewhere").state() == "elsewhere"
    assert replace(owner, pid_namespace="pid:[1]").state() == "elsewhere"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert owner.state() == "dead"  # not yet reaped by its parent
    process.wait()
    assert owner.state() == "dead"


CLAIM = """
import sys
from pathlib import Path
from placement.ledger import Ledger
Ledger.open("run", Path(sys.argv[1])).record(sys.argv[2], "GPU-1", "borrowed", {"uuid": "MIG-1"})
print("claimed", flush=True)
input()
"""


@pytest.mark.parametrize(("backend", "after"), [("mig", "dead"), ("mps", "elsewhere")])
def test_another_container_sees_the_owner_s_death_by_its_lock(tmp_path, monkeypatch, backend, after):
    """But the daemon of MPS may live on where the owner was."""
    here = ledger._this_host()
    command = [sys.executable, "-c", CLAIM, str(tmp_path), backend]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline() == b"claimed\n"
        (claim,) = all_ledgers(tmp_path)[0]
        monkeypatch.setattr(ledger, "_this_host", lambda: here | {"host": "box", "pid_namespace": "pid:[1]"})
        assert claim.owner.state() == "elsewhere"
        assert claim.owner_state() == ("alive" if backend == "mig" else "elsewhere")
        owner.kill()
    assert claim.owner_state() == after
    assert [found.path for found in stale_ledgers(tmp_path)] == ([claim.path] if after == "dead" else [])


def test_a_claim_without_a_lock_or_of_another_host_stays(tmp_path, monkeypatch):
    claim = Ledger.open("run", tmp_path)
    claim.record("mig", "GPU-1", "borrowed", {"uuid": "MIG-1"})
    here = ledger._this_host()
    other = here | {"host": "box", "pid_namespace": "pid:[1]"}
    monkeypatch.setattr(ledger, "_this_host", lambda: other | {"boot_id": "of another host"})
    assert claim.owner_state() == "elsewhere"
    monkeypatch.setattr(ledger, "_this_host", lambda: other)
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink()
    assert claim.owner_state() == "elsewhere"


def test_one_process_at_a_time_has_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr("placement.ledger.LOCK_LIMIT_S", 0.2)
    with (
        exclusive_lock(tmp_path),
        pytest.raises(PartitionError, match="other processes have held it for"),
        exclusive_lock(tmp_path),
    ):
        pass
    with exclusive_lock(tmp_path):
        pass


def test_the_cache_s_place_is_the_desktop_standard_s(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "rayagi" / "ledgers"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_directory()) == "/home/someone/.cache/rayagi/ledgers"


def test_the_file_names_the_process_and_how_to_undo(tmp_path):
    ledger = Ledger.open("Ant-v5", tmp_path)
    step = ledger.record("mps", "GPU-1", "daemon", {"folder": "/tmp/rayagi-mps-1"})
    content = json.loads(ledger.path.read_text())
    assert content["owner"]["pid"] == os.getpid()
    assert content["steps"][0]["undo"] == {"folder": "/tmp/rayagi-mps-1"}
    assert str(step) == "mps daemon on GPU-1 (folder=/tmp/rayagi-mps-1)"


def test_each_running_host_has_a_lock_of_its_own_in_a_shared_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("placement.ledger.LOCK_LIMIT_S", 0.2)
    here = ledger._this_host()
    with exclusive_lock(tmp_path):
        # A container of this host has another name, and the same GPUs.
        monkeypatch.setattr(ledger, "_this_host", lambda: here | {"host": "a container"})
        with pytest.raises(PartitionError), exclusive_lock(tmp_path):
            pass
        monkeypatch.setattr(ledger, "_this_host", lambda: here | {"boot_id": "of another host"})
        with exclusive_lock(tmp_path):
            pass


def test_a_gpu_is_called_by_its_index_or_the_beginning_of_its_uuid():
    gpu = Gpu(index=1, uuid="GPU-8932f937-d72c", name="A", memory_total_bytes=1)
    assert all(map(gpu.is_called, ("1", " 1", "GPU-8932f937", "GPU-8932f937-d72c")))
    assert not any(map(gpu.is_called, ("0", "11", "", " ", "GPU-9")))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])  # of NFS and of Lustre without locks
def test_a_folder_that_cannot_be_locked_is_said_with_what_to_do(tmp_path, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(
            PartitionError, match=f"{os.strerror(number)}.*Set XDG_CACHE_HOME to a writable folder"
        ),
        exclusive_lock(tmp_path),
    ):
        raise AssertionError("nothing was locked")


def test_a_folder_that_cannot_be_made_is_said_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(PartitionError, match=r"Not a directory.*Set XDG_CACHE_HOME to a writable folder"),
        exclusive_lock(tmp_path / "file" / "ledgers"),
    ):
        raise AssertionError("nothing was locked")
