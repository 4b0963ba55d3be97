"""Process watcher: a child that ends, and a process id that is reused."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from collectives.process_watcher import ProcessWatcher
from collectives.rendezvous import this_member
from collectives.transports.device_memory import remove_leftovers


@pytest.fixture
def child():
    """A process that runs until its input is closed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.kill()
    process.wait()


def end(process):
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_an_ended_process_is_reported_while_it_is_watched(child):
    processes = ProcessWatcher([os.getpid(), child.pid])
    assert processes.ended() == set()
    end(child)
    assert processes.ended() == {child.pid}
    processes.watch_only([os.getpid()])
    assert processes.ended() == set()
    processes.close()
    processes.close()


def test_an_id_that_has_ended_is_not_ended_once_it_is_watched_as_another_process(monkeypatch):
    def nobody(pid):
        raise ProcessLookupError(pid)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", nobody)
        processes = ProcessWatcher([os.getpid()])
        assert processes.ended() == {os.getpid()}
    processes.watch(os.getpid())
    assert processes.ended() == set()
    processes.close()


def test_an_id_that_is_now_a_thread_s_is_ended():
    with ThreadPoolExecutor(1) as pool:
        thread_id = pool.submit(threading.get_native_id).result()
        processes = ProcessWatcher([os.getpid(), thread_id])
        assert processes.ended() == {thread_id}
        processes.close()


def test_watching_again_opens_no_second_descriptor(child):
    processes = ProcessWatcher([child.pid])
    before = len(os.listdir("/proc/self/fd"))
    processes.watch(child.pid)
    assert len(os.listdir("/proc/self/fd")) == before
    end(child)
    processes.watch(child.pid)
    assert len(os.listdir("/proc/self/fd")) == before
    processes.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_files_of_members_that_have_ended_are_removed_and_no_descriptor_stays_open(child):
    members = [this_member(0), replace(this_member(1), pid=child.pid)]
    files = [Path(f"/dev/shm/torch_{member.pid}_test") for member in members]
    before = len(os.listdir("/proc/self/fd"))
    try:
        for file in files:
            file.touch()
        remove_leftovers(members)
        assert [file.exists() for file in files] == [True, True]
        end(child)
        remove_leftovers(members)
        assert [file.exists() for file in files] == [True, False]
    finally:
        for file in files:
            file.unlink(missing_ok=True)
    assert len(os.listdir("/proc/self/fd")) == before
