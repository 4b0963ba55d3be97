"""Headlines of experiments whose rows a GPU, or a ring, or the use of cores gives; worked out by hand."""

import json
import os
import subprocess
import sys

import pytest
import torch

from experiments.allreduce import ring
from experiments.gpu_sharing import run as gpu_sharing
from experiments.profiler import cores, gpu
from experiments.replay import on_gpu
from rayagi.profiler.layout import Category


def test_true_use_of_a_gpu_stands_beside_nvmls_figure(tmp_path):
    row = {
        "workers": 2,
        "nvml_utilization": 96.4,
        "gpu_share_together": 0.07,
        "by_worker": [{"gpu_ns": 3, "whole_ns": 100}, {"gpu_ns": 5, "whole_ns": 100}],
    }
    assert gpu.workers_headline([row]) == "2 processes: NVML 96.4 %, in use 7.0 %, by one of them 4.0 %"
    gpu.draw_workers([row], tmp_path / "workers.png")
    assert (tmp_path / "workers.png").exists()
    row["nvml_utilization"] = None  # of a MIG instance
    assert gpu.workers_headline([row]).startswith("2 processes: NVML not available, in use 7.0 %")
    gpu.draw_workers([row], tmp_path / "workers.png")


def test_the_cost_of_a_call_is_told_in_microseconds(tmp_path):
    row = {"call": "cudaLaunchKernel", "ns": [3000, 3200], "recorded_ns": [6000, 6300], "cost_ns": 3050}
    assert gpu.calls_headline([row]) == "cudaLaunchKernel 3.05 us"
    gpu.draw_calls([row], tmp_path / "calls.png")
    assert (tmp_path / "calls.png").exists()


def sharing(case, *rates):
    return [{"task": "Ant-v5", "case": case, "steps_per_s": rate} for rate in rates]


def test_mps_is_compared_with_plain_sharing_by_as_many(tmp_path):
    runs = [
        *sharing("single process", 90, 100, 110),
        *sharing("direct x2", 120),
        *sharing("mps x2", 150, 170, 180),
        {"task": "Ant-v5", "case": "mps x2", "failed": "no daemon"},
        *sharing("mps x4", 200),
    ]
    # 170 / 120 and 170 / 100; four GMIs have nothing to be compared with.
    assert gpu_sharing.headline(runs) == (
        "Ant-v5, over one process: direct x2 1.20, mps x2 1.70, mps x4 2.00; MPS over plain sharing: 2 GMIs 1.42"
    )
    assert gpu_sharing.headline(runs[:4]) == "Ant-v5, over one process: direct x2 1.20"
    assert gpu_sharing.headline(runs[3:-1]) == "Ant-v5, MPS over plain sharing: 2 GMIs 1.42"
    gpu_sharing.draw(runs, tmp_path / "sharing.png")
    assert "| Ant-v5 | mps x2 | 170 | 150 - 180 | 1.70 |" in gpu_sharing.table(runs[:3] + runs[4:7])


def test_rates_are_compared_within_a_repeat(tmp_path):
    rows = [
        {"task": "Ant-v5", "steps_per_s": {"rayagi": 300, "ring": 200}},
        {"task": "Ant-v5", "steps_per_s": {"rayagi": 200, "ring": 100}},
        {"task": "Hopper-v5", "steps_per_s": {"rayagi": 125, "ring": 100}},
    ]
    assert ring.headline(rows) == (
        "1.50 times on average: Ant-v5 1.75 (1.50-2.00 of 2), Hopper-v5 1.25 (1.25-1.25 of 1)"
    )
    ring.draw(rows, tmp_path / "ring.png")


def test_the_use_of_cores_is_cpu_time_over_the_time_of_all(tmp_path):
    row = {
        "task": "Ant-v5",
        "cores": 2,
        "phases": {
            "simulate": {"ns": 600, "cpu_ns": 1200},
            "learn": {"ns": 400, "cpu_ns": 400},
        },
        "spans": [["simulate", 0.0, 0.6, 1.0], ["learn", 0.6, 1.0, 0.5]],
    }
    # Of 2 * 1000 ns, 1200 and 400.
    assert cores.headline([row]) == (
        "of the cores in use: Ant-v5 80 % (simulate 100 % for 60 % of the time, learn 50 % for 40 % of the time)"
    )
    cores.draw([row], tmp_path / "cores.png")


def test_spans_count_for_the_innermost_operation(monkeypatch):
    moments = iter([(0, 0), (10, 5), (30, 25), (70, 65), (100, 95), (110, 96)])
    monkeypatch.setattr(cores, "_now", lambda: next(moments))
    found = cores.UseOfCores()
    found.begin(Category.ITERATION, "iteration")
    found.begin(Category.OPERATION, "collect")
    found.begin(Category.OPERATION, "simulate")
    found.end(Category.OPERATION, "simulate")
    found.end(Category.OPERATION, "collect")
    assert found.spans == [
        ("between", (10, 5), (30, 25)),
        ("collect", (30, 25), (70, 65)),
        ("simulate", (70, 65), (100, 95)),
        ("collect", (100, 95), (110, 96)),
    ]


def test_the_use_of_cores_of_a_small_run(monkeypatch):
    monkeypatch.setattr(cores, "NUM_ENVS", 4)
    row = cores.measure("HalfCheetah-v5", 2, (0,))
    assert {"collect", "learn"} <= row["phases"].keys()
    assert all(each["cpu_ns"] >= 0 for each in row["phases"].values())
    assert 0 < cores.utilization(row["phases"], 1)["all"] < 1.5


def test_a_worker_that_says_nothing_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(gpu, "LONGEST_WAIT_S", 0.0)
    source, sink = os.pipe()
    with open(source) as stream, open(sink, "w"), pytest.raises(SystemExit, match="has said nothing for 0 s"):
        gpu._line(stream)


def test_batches_that_were_measured_are_kept_when_the_time_is_up(monkeypatch, tmp_path):
    def measure(work, store, batch, *limits):
        if batch == 4:
            raise KeyboardInterrupt
        return [{"batch": batch}]

    monkeypatch.setattr(on_gpu, "WORKS", (on_gpu.Work("W", {"obs": 2}, 8, 1, (2, 4)),))
    monkeypatch.setattr(on_gpu, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        on_gpu.main()
    assert json.loads((tmp_path / "on_gpu.json").read_text())["rows"] == [{"batch": 2}]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    command = [sys.executable, "-m", "experiments.profiler.gpu", "calls", "--out", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "Nothing was measured: there is no GPU here.\n")
    assert not list(tmp_path.iterdir())
