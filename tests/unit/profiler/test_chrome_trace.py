"""Traces of torch.profiler and Ray beside a profile."""

import io
import json
import time

import pytest
import torch

from rayagi.cli import main
from rayagi.profiler.chrome_trace import read_chrome_trace
from rayagi.profiler.perfetto import write_perfetto
from rayagi.profiler.trace import Category as C
from rayagi.profiler.trace import TraceError
from tests.unit.profiler.test_perfetto import decode
from tests.unit.profiler.traces import process, profile, write

KINETO = {
    "baseTimeNanoseconds": 10_000,
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 41, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": 41, "tid": 7, "args": {"name": "main"}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 41, "tid": 7, "ts": 1.5, "dur": 2},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": "stream 7", "ts": 2, "dur": 0.25},
        {"ph": "i", "name": "mark", "pid": 41, "tid": 7, "ts": 3},
    ],
}
RAY = [
    {
        "ph": "X",
        "cat": "task::step",
        "name": "step",
        "pid": "127.0.0.1",
        "tid": "worker:1",
        "ts": 13.0,
        "dur": 1,
    }
]


@pytest.fixture
def trace(tmp_path):
    def make(content):
        path = tmp_path / f"{time.monotonic_ns()}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return make


def test_kineto_s_events_have_unix_time_and_categories(trace):
    python, device = read_chrome_trace(trace(KINETO))
    assert (python.label, device.label) == ("python", "process 0")
    ((name, events),) = python.threads
    assert name == "main"
    assert events[["start", "end", "category"]].tolist() == [(11_500, 13_500, C.BACKEND)]
    assert python.name_of(int(events["name"][0])) == "aten::mm"
    ((name, events),) = device.threads
    assert (name, events[["start", "end", "category"]].tolist()) == (
        "thread stream 7",
        [(12_000, 12_250, C.GPU_KERNEL)],
    )


def test_they_are_on_the_profile_s_clock(trace):
    # The first process read 1,000 on its monotonic clock when it was 9,000 in Unix time.
    own = process(
        [[(C.THREAD, 100, 9_000, "main", 0), (C.BACKEND, 3_000, 4_000, "mm", 0)]], clock=(1_000, 9_000)
    )
    file = io.BytesIO()
    others = [*read_chrome_trace(trace(KINETO)), *read_chrome_trace(trace(RAY))]
    assert write_perfetto(profile(own), file, others) == 1 + 3
    tracks, events, _ = decode(file.getvalue())
    begun = {name: (time_ns, tracks[track]) for track, time_ns, kind, name, _ in events if kind == 1}
    assert begun == {
        "mm": (3_000, "thread 1"),
        "aten::mm": (3_500, "main"),
        "gemm": (4_000, "thread stream 7"),
        "step": (5_000, "thread worker:1"),
    }


def test_torch_s_own_trace_is_where_its_time_was(tmp_path):
    before = time.time_ns()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        torch.ones(64, 64) @ torch.ones(64, 64)
    after = time.time_ns()
    recorded.export_chrome_trace(str(tmp_path / "kineto.json"))
    found = {
        each.name_of(int(event["name"])): event
        for each in read_chrome_trace(tmp_path / "kineto.json")
        for _, events in each.threads
        for event in events
    }
    product = found["aten::mm"]
    assert before - 1e8 <= product["start"] <= product["end"] <= after + 1e8
    assert product["category"] == C.BACKEND


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no trace in Chrome's format"),
        ("7", "no list of traceEvents"),
        ({"traceEvents": {}}, "no list of traceEvents"),
        ({"traceEvents": [], "baseTimeNanoseconds": -1}, "no list of traceEvents"),
        ([{"ph": "X", "name": "a"}], "is damaged: an event has KeyError"),
        ([{"ph": "X", "ts": "soon"}], "is damaged: an event has ValueError"),
        ([{"ph": "X", "ts": float("nan")}], "a time of nan us"),
        ([{"ph": "X", "ts": 1, "dur": -1}], "a time of 1.0 us for -1.0 us"),
        ([{"ph": "M", "name": "process_name", "args": 3}], "is damaged"),
    ],
)
def test_other_files_are_explained(trace, content, reason):
    with pytest.raises(TraceError, match=reason) as raised:
        read_chrome_trace(trace(content))
    assert "\n" not in str(raised.value)


def test_the_command_merges_and_names_what_it_cannot_read(trace, tmp_path, capsys):
    folder = write(tmp_path / "profile", profile(process([[(C.THREAD, 0, 9, "main", 0)]])))
    out = str(tmp_path / "out.perfetto-trace")
    assert (
        main(
            ["profile", "export", str(folder), out, "--merge", str(trace(KINETO)), "--merge", str(trace(RAY))]
        )
        == 0
    )
    assert "3 events" in capsys.readouterr().out
    assert main(["profile", "export", str(folder), out, "--merge", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err
