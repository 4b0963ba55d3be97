"""Waits of a thread, by the kernel's counters."""

import mmap
import os
import time

import pytest

from rayagi.monitoring.exporting import ThreadClock


def test_a_thread_that_shares_its_core_waits_about_half_of_the_time():
    core = min(os.sched_getaffinity(0))
    # A process: a thread would hold the interpreter's lock instead of the core.
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {core})
        while True:
            pass
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
        with ThreadClock() as clock:
            started, cpu = time.perf_counter(), time.thread_time()
            while time.thread_time() - cpu < 0.2:
                pass
            waited, lasted = clock.lap(), time.perf_counter() - started
            again = clock.lap()
    finally:
        os.sched_setaffinity(0, before)
        os.kill(child, 9)
        os.waitpid(child, 0)
    # A thread that never sleeps is on its core or waits for it.
    assert waited["queue_s"] == pytest.approx(lasted - 0.2, abs=0.05 * lasted + 0.01)
    assert waited["queue_s"] > 0.05
    assert again["queue_s"] < waited["queue_s"]


def test_pages_from_disk_are_counted(tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    with path.open("rb") as file, ThreadClock() as clock:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)  # no pages read ahead
            clock.lap()
            total = sum(mapped[at] for at in range(0, len(mapped), mmap.PAGESIZE))
        faults = clock.lap()["major_faults"]
    assert total > 0
    if faults == 0:
        pytest.skip("this file system keeps its pages")
    assert faults <= 64


def test_without_the_kernel_s_counter_there_is_no_queue(monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", missing)
    with ThreadClock() as clock:
        assert clock.lap().keys() == {"major_faults"}
