"""What the profiler records of a real GPU."""

import threading

import pytest
import torch

from rayagi import profiler
from rayagi.profiler.gpu_calls import function_costs, measured
from rayagi.profiler.layout import Category
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.trace import read_profile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]


def events_of(process, category):
    return [each for thread in process.threads for each in thread.events if each["category"] == category]


def only(process, category, word):
    return [each for each in events_of(process, category) if word in process.name_of(int(each["name"]))]


def test_kernels_copies_and_calls_lie_within_the_operation_that_waits_for_them(tmp_path):
    torch.ones(8, device="cuda").sum().item()
    with profiler.profile(tmp_path / "p", gpu=True):
        with profiler.operation("multiply"):
            matrix = torch.ones(2048, 2048, device="cuda")
            for _ in range(10):
                matrix = matrix @ matrix * 1e-6
            torch.cuda.synchronize()
        with profiler.operation("copy"):
            matrix.cpu()
    (process,) = read_profile(tmp_path / "p").processes
    operations = {process.name_of(int(each["name"])): each for each in events_of(process, Category.OPERATION)}
    kernels, copies = (events_of(process, category) for category in (Category.GPU_KERNEL, Category.GPU_COPY))
    assert len(kernels) >= 21  # a fill, ten products, ten scalings
    within = operations["multiply"]
    assert all(within["start"] <= each["start"] <= each["end"] <= within["end"] for each in kernels)
    (to_host,) = (each for each in copies if "DtoH" in process.name_of(int(each["name"])))
    assert operations["copy"]["start"] <= to_host["start"] <= to_host["end"] <= operations["copy"]["end"]
    launches = only(process, Category.GPU_RUNTIME, "LaunchKernel")
    assert len(launches) == len(kernels)
    for launch, kernel in zip(sorted(launches, key=start_of), sorted(kernels, key=start_of), strict=True):
        assert launch["start"] < kernel["start"]
    found = breakdown(read_profile(tmp_path / "p"))
    assert found.processes[0].threads == 1
    rows = [row for row in found.rows if row.cell.operation == "multiply"]
    busy = sum(row.ns for row in rows if "gpu_kernel" in row.categories)
    assert 0 < busy <= sum(row.ns for row in rows)


def start_of(event):
    return int(event["start"])


def test_each_of_two_cycles_has_its_own_kernels(tmp_path):
    values = torch.ones(1000, device="cuda")
    schedule = Schedule(skip=1, warm_up=0, record=1, repeat=2)
    with profiler.profile(tmp_path / "p", schedule=schedule, gpu=True):
        for _ in range(5):
            with profiler.iteration():
                values.add_(1.0)
                torch.cuda.synchronize()
    (process,) = read_profile(tmp_path / "p").processes
    assert len(events_of(process, Category.GPU_KERNEL)) == 2


def test_backward_threads_calls_are_recorded(tmp_path):
    weights = torch.ones(256, 256, device="cuda", requires_grad=True)
    (weights @ weights).sum().backward()
    with profiler.profile(tmp_path / "p", gpu=True), profiler.operation("learn"):
        (weights @ weights).sum().backward()
        torch.cuda.synchronize()
    (process,) = read_profile(tmp_path / "p").processes
    found = breakdown(read_profile(tmp_path / "p"))
    assert any("gpu_runtime" in row.categories for row in found.rows if row.cell.operation == "learn")
    own = [each for each in process.threads if each.thread_id == threading.get_native_id()]
    assert own


def test_a_graph_of_several_kernels_is_recorded_kernel_by_kernel(tmp_path):
    values = torch.ones(1000, device="cuda")
    values.add_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            values.add_(1.0)
    with profiler.profile(tmp_path / "p", gpu=True):
        graph.replay()
        torch.cuda.synchronize()
    (process,) = read_profile(tmp_path / "p").processes
    assert len(events_of(process, Category.GPU_KERNEL)) == 5


def test_calls_of_cuda_are_calibrated_under_the_names_of_their_events(tmp_path):
    costs = function_costs(measured(repeats=1))
    with profiler.profile(tmp_path / "p", gpu=True):
        torch.ones(8).pin_memory().to("cuda", non_blocking=True).add_(1.0)
        torch.cuda.Event().record()
        torch.cuda.current_stream().synchronize()
    (process,) = read_profile(tmp_path / "p").processes
    called = {process.name_of(int(each["name"])) for each in events_of(process, Category.GPU_RUNTIME)}
    assert {"cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize"} <= costs.keys() & called
    assert costs["cudaLaunchKernel"] > 0
