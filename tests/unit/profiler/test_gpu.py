"""What a GPU did, from Kineto's events to the tables; with a stand-in for torch.profiler, as there is no GPU here."""

import ctypes
import errno
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayagi import profiler
from rayagi.profiler.layout import Category
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.summary import gpu_lines
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import read_profile


class FakeEvent:
    """One of Kineto's."""

    def __init__(self, device, lane, name, start, length):
        self.device, self.lane, self.text, self.start, self.length = device, lane, name, start, length

    def device_type(self):
        return SimpleNamespace(name="CPU" if self.device is None else "CUDA")

    def device_index(self):
        return self.device or 0

    def device_resource_id(self):
        return self.lane

    def name(self):
        return self.text

    def start_ns(self):
        return self.start

    def duration_ns(self):
        return self.length


class FakeKineto:
    """In place of torch.profiler and of torch's first use of a GPU."""

    def __init__(self):
        self.events, self.queued, self.is_used = [], [], True
        self.started, self.stopped, self.threads, self.failure = 0, 0, set(), None

    def profile(self, activities, acc_events):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        results = SimpleNamespace(events=lambda: self.events)
        return SimpleNamespace(
            start=self.start, stop=self.stop, profiler=SimpleNamespace(kineto_results=results)
        )

    def start(self):
        if self.failure:
            raise self.failure
        self.started += 1
        self.threads.add(threading.get_ident())

    def stop(self):
        self.stopped += 1
        assert threading.get_ident() in self.threads  # Kineto wants the thread that started it

    def lazy_call(self, function):
        function() if self.is_used else self.queued.append(function)

    def add(self, device, lane, name, length, after=0):
        """An event that begins ``after`` ns from now, and is over when this returns."""
        start = time.time_ns() + after
        self.events.append(FakeEvent(device, lane, name, start, length))
        while time.time_ns() <= start + length:
            pass
        return start


@pytest.fixture
def kineto(monkeypatch):
    fake = FakeKineto()
    monkeypatch.setattr(torch.profiler, "profile", fake.profile)
    monkeypatch.setattr(torch.cuda, "_lazy_call", fake.lazy_call)
    return fake


def this_thread():
    """As CUPTI names it."""
    return ctypes.c_int32(threading.get_ident()).value


def times_of(found, operation):
    sums = {}
    for row in found.rows:
        if row.cell.operation == operation:
            for category in row.categories:
                sums[category] = sums.get(category, 0) + row.ns
    return sums


def test_kernels_copies_and_calls_count_for_the_operation_that_they_run_in(tmp_path, kineto):
    with profiler.profile(tmp_path / "p", gpu=True):
        with profiler.operation("learn"):
            kineto.add(None, this_thread(), "cudaLaunchKernel", 40_000)
            start = kineto.add(0, 7, "gemm", 300_000)
            kineto.events.append(FakeEvent(0, 13, "other stream", start + 100_000, 100_000))  # within gemm
            kineto.add(0, 7, "Memcpy HtoD (Pinned -> Device)", 50_000)
        with profiler.operation("act"):
            kineto.add(1, 7, "gemm", 20_000)
    profile = read_profile(tmp_path / "p")
    found = breakdown(profile)
    learn, act = times_of(found, "learn"), times_of(found, "act")
    assert (learn["gpu_kernel"], learn["gpu_copy"], learn["gpu_runtime"]) == (300_000, 50_000, 40_000)
    assert act["gpu_kernel"] == 20_000
    assert "gpu_runtime" not in act
    assert found.processes[0].threads == 1  # streams are none, and the calls are those of the only one
    (process,) = profile.processes
    names = {process.name_of(int(each["name"])) for thread in process.threads for each in thread.events}
    assert {"gemm", "other stream", "cudaLaunchKernel", "Memcpy HtoD (Pinned -> Device)"} <= names


def test_the_report_tells_the_share_of_the_gpu_beside_nvmls_figure(tmp_path, kineto, monkeypatch):
    sampled = threading.Event()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "utilization", lambda _device: sampled.set() or 97)
    with profiler.profile(tmp_path / "p", gpu=True):
        kineto.add(0, 7, "gemm", 300_000)
        assert sampled.wait(10)
    profile = read_profile(tmp_path / "p")
    found = breakdown(profile)
    (line,) = gpu_lines(profile, found, found.processes[0].label)
    whole = sum(found.totals[""].values())
    assert f"on a GPU for {30_000_000 / whole:.1f} %" in line
    assert "NVML's utilisation of GPU 0 on average 97 %" in line
    page = report_page(profile, found, [], timeline(profile))
    assert "NVML&#x27;s utilisation of GPU 0 on average 97 %" in page


def test_nothing_starts_before_torch_uses_a_gpu(tmp_path, kineto):
    kineto.is_used = False
    with profiler.profile(tmp_path / "p", gpu=True):
        assert kineto.started == 0
        kineto.is_used = True
        (begin,) = kineto.queued
        begin()
        assert kineto.started == 1
    assert kineto.stopped == 1
    begin()  # of a queue that outlives the recording
    assert kineto.started == 1


def test_a_recording_that_ends_while_the_gpu_s_begins_leaves_nothing_running(tmp_path, kineto):
    kineto.is_used = False
    with profiler.profile(tmp_path / "p", gpu=True) as session:
        (begin,) = kineto.queued
        recorder, started = session._gpu, kineto.start

        def start():
            recorder.stop(tmp_path)  # as another thread does
            started()

        kineto.start = start
        begin()
    assert (kineto.started, kineto.stopped) == (1, 1)


def test_each_cycle_of_a_schedule_is_recorded_for_itself(tmp_path, kineto):
    schedule = Schedule(skip=1, warm_up=0, record=1, repeat=2)
    with profiler.profile(tmp_path / "p", schedule=schedule, gpu=True):
        for _ in range(5):
            with profiler.iteration(), profiler.operation("learn"):
                kineto.events.clear()
                kineto.add(None, this_thread(), "cudaLaunchKernel", 1_000)
                kineto.add(0, 7, "gemm", 10_000)
    assert (kineto.started, kineto.stopped) == (2, 2)
    found = breakdown(read_profile(tmp_path / "p"))
    by_iteration = {row.cell.iteration: row.ns for row in found.rows if "gpu_kernel" in row.categories}
    assert by_iteration == {1: 10_000, 3: 10_000}
    assert times_of(found, "learn")["gpu_runtime"] == 2_000
    assert found.processes[0].threads == 1


@pytest.mark.parametrize("thread", [123_456, -123_456])  # the low 32 bits of a pthread_t, with a sign
def test_calls_of_threads_without_python_are_kept(tmp_path, kineto, thread):
    with profiler.profile(tmp_path / "p", gpu=True), profiler.operation("learn"):
        kineto.add(None, thread, "cudaLaunchKernel", 5_000)
    found = breakdown(read_profile(tmp_path / "p"))
    assert times_of(found, "learn")["gpu_runtime"] == 5_000


def test_a_gpu_that_cannot_be_recorded_does_not_disturb_the_rest(tmp_path, kineto, caplog):
    kineto.failure = RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")
    with (
        caplog.at_level(logging.WARNING),
        profiler.profile(tmp_path / "p", gpu=True),
        profiler.operation("learn"),
    ):
        torch.ones(3).sum()
    assert "the GPU is not recorded: RuntimeError: CUPTI_ERROR" in caplog.text
    assert times_of(breakdown(read_profile(tmp_path / "p")), "learn")["backend"] > 0


def test_what_goes_beyond_the_limit_is_counted(tmp_path, kineto):
    with profiler.profile(tmp_path / "p", gpu=True, limit_mb=1):
        start = time.time_ns()
        kineto.events += [FakeEvent(0, 7, "gemm", start + at, 1) for at in range(50_000)]  # 1.2 MB
    (summary,) = breakdown(read_profile(tmp_path / "p")).processes
    assert summary.dropped == 50_000 - 1_000_000 // 24


def test_a_forked_child_does_not_stop_what_its_parent_started(tmp_path, kineto):
    with profiler.profile(tmp_path / "p", gpu=True):
        child = os.fork()
        if not child:
            with profiler.operation("in the child"):
                os._exit(3 if kineto.stopped else 0)
        assert os.waitpid(child, 0)[1] == 0
        kineto.add(0, 7, "gemm", 1_000)
    assert kineto.stopped == 1
    parent, forked = sorted(read_profile(tmp_path / "p").processes, key=lambda each: each.pid != os.getpid())
    kernels = [
        np.count_nonzero(thread.events["category"] == Category.GPU_KERNEL)
        for process in (parent, forked)
        for thread in process.threads
    ]
    assert sum(kernels) == 1


def test_events_that_find_no_space_are_counted_and_the_rest_can_be_read(tmp_path, kineto, monkeypatch):
    def full(path, data):
        path.open("wb").write(data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with profiler.profile(tmp_path / "p", gpu=True):
        kineto.add(0, 7, "gemm", 1_000)
        with profiler.operation("learn"):
            pass
        monkeypatch.setattr(Path, "write_bytes", full)
    found = breakdown(read_profile(tmp_path / "p"))
    assert found.processes[0].dropped == 1
    assert "learn" in {row.cell.operation for row in found.rows}
    assert list((tmp_path / "p").rglob("*.tmp")) == []
