"""Ends of processes that cannot write them themselves."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from rayagi.cli import main
from rayagi.profiler.layout import Category
from rayagi.profiler.process_ends import ProcessWatch, ends_noted
from rayagi.profiler.process_folder import host_name, read_stat, start_ticks
from rayagi.profiler.session import create_profile
from rayagi.profiler.trace import read_profile

RECORDED = """
import os, pathlib, sys
from rayagi.profiler import session
started = session.start(pathlib.Path(sys.argv[1]), {})
print("ready", flush=True)
"""


@contextmanager
def started(profile, then):
    """A recorded process that has said that it is ready, and what it does then."""
    command = [sys.executable, "-c", RECORDED + then, str(profile)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        yield child


@pytest.fixture
def profile(tmp_path):
    return create_profile(tmp_path / "p", [], {})


def end_of(profile):
    return read_profile(profile).processes[0].end_ns


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_killed_process_is_noted(profile, number):
    watch = ProcessWatch(profile)
    with started(profile, "input()") as child:
        watch.look()
        before = time.monotonic_ns()
        child.send_signal(number)
        watch.note_ends(60)
        assert before < end_of(profile) <= time.monotonic_ns()
    watch.finish()
    watch.run()  # nothing is left to wait for


def test_a_process_that_ends_its_recording_writes_its_end_itself(profile):
    watch = ProcessWatch(profile)
    with started(profile, "session.stop(started); input()") as child:
        watch.look()
        child.communicate(b"\n", timeout=60)
        watch.note_ends(60)
    assert not list(profile.glob("*/end.json"))
    assert end_of(profile) > 0


def test_a_process_that_replaced_its_program_without_python_s_exec_is_not_watched(profile):
    """The other program's time is none of the recorded one's. cat answers once it runs."""
    watch = ProcessWatch(profile)
    with started(profile, "session._execv('/bin/cat', ['cat'])") as child:
        child.stdin.write(b"x\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"x\n"
        watch.look()
        child.kill()
        child.wait(60)
        watch.note_ends(0)
    assert not list(profile.glob("*/end.json"))


def test_one_that_replaces_its_program_later_is_forgotten(profile):
    watch = ProcessWatch(profile)
    then = "sys.stdin.buffer.raw.readline(); session._execv('/bin/cat', ['cat'])"
    with started(profile, then) as child:
        watch.look()
        child.stdin.write(b"go\n")
        child.stdin.flush()
        child.stdin.write(b"x\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"x\n"
        watch.look()
        child.kill()
        child.wait(60)
        watch.note_ends(0)
    assert not list(profile.glob("*/end.json"))


def test_processes_of_other_hosts_and_other_times_are_not_watched(profile):
    pid, ticks = os.getpid(), start_ticks(read_stat(os.getpid()))
    for name in (f"elsewhere-{pid}-{ticks}", f"{host_name()}-{pid}-{ticks + 1}", f"{host_name()}-1", "x"):
        (profile / name).mkdir()
        (profile / name / "process.json").write_text('{"mark": ""}')
    watch = ProcessWatch(profile)
    watch.look()
    watch.finish()
    watch.run()  # would wait for this process
    assert not list(profile.glob("*/end.json"))


def test_a_profile_that_is_deleted_ends_no_watch(profile):
    with ends_noted(profile):
        (profile / "profile.json").unlink()
        profile.rmdir()


KILLED = """
import os, signal, time
from pathlib import Path
from rayagi import profiler

def is_watched():
    for info in Path(f"/proc/{os.getppid()}/fdinfo").glob("*"):
        try:
            if f"Pid:\\t{os.getpid()}\\n" in info.read_text():
                return True
        except OSError:
            pass
    return False

with profiler.operation("learn"):
    limit = time.monotonic() + 60
    while not is_watched():
        assert time.monotonic() < limit
    Path("killed_at").write_text(str(time.monotonic_ns()))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_command_counts_a_killed_program_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--out", "p", "--", sys.executable, "-c", KILLED]) == 128 + signal.SIGKILL
    (process,) = read_profile("p").processes
    (thread,) = process.threads
    assert process.end_ns > int((tmp_path / "killed_at").read_text()) > thread.start_ns
    assert [int(end) for end in thread.events["end"]] == [0, 0, 0]
    assert Category(int(thread.events["category"][2])) is Category.OPERATION
    assert main(["profile", "report", "p"]) == 0
    assert "; killed\n" in capsys.readouterr().out
