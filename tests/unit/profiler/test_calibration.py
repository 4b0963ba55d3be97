"""The profiler's own cost, on programs whose true cost is known: each is traced as it is, and with hooks that take time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.profiler import overlap
from rayagi.profiler.calibration import (
    PROCESS,
    Calibration,
    CalibrationBlock,
    CalibrationError,
    corrected,
    count_hooks,
    delta_calibration,
)
from rayagi.profiler.gpu_calls import CallTimes, function_costs, measured
from rayagi.profiler.layout import FROM_PYTHON
from rayagi.profiler.overlap import NONE, breakdown
from rayagi.profiler.trace import Category as C
from tests.unit.profiler.traces import process, profile

CALL, ANNOTATION = 7, 4


def trace(program, call=0, annotation=0):
    """Events of a tree of ("python", ns), (category, name, [inner ...]); hooks take time where rayagi's do."""
    events, time = [], 1  # an end of 0 would say that it never came

    def run(step, depth):
        nonlocal time
        if step[0] == "python":
            time += step[1]
            return
        category, name, inner = step
        start, is_scope = time, category < 16
        time += 1 + (annotation // 2 if is_scope else 0)
        for each in inner:
            run(each, depth + 1)
        events.append((category, start, time, name, depth))
        time += annotation // 2 if is_scope else call

    for step in program:
        run(step, 1)
    return [(C.THREAD, 1, time, "main", 0), *events]


def table(found):
    return {(row.cell, row.categories): row.ns for row in found.rows}


steps = st.recursive(
    st.tuples(st.just("python"), st.integers(1, 20)),
    lambda inner: st.tuples(
        st.sampled_from([C.OPERATION, C.BACKEND, C.SIMULATOR, C.PHASE, C.ITERATION]),
        st.sampled_from("ab"),
        st.lists(inner, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(("block", "window"), [(1 << 16, 4), (2, 1)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(program=st.lists(steps, max_size=5))
def test_what_hooks_took_is_removed_where_they_took_it(block, window, program):
    kept = overlap.BLOCK_EVENTS, overlap.WINDOW_BLOCKS
    overlap.BLOCK_EVENTS, overlap.WINDOW_BLOCKS = block, window
    try:
        slow = profile(process([trace(program, CALL, ANNOTATION)]))
        found = corrected(slow, Calibration({"call": CALL, "annotation": ANNOTATION}))
    finally:
        overlap.BLOCK_EVENTS, overlap.WINDOW_BLOCKS = kept
    truth = breakdown(profile(process([trace(program)])))
    assert table(found) == table(truth)
    assert found.totals == truth.totals
    assert found.transitions == truth.transitions


def test_costs_that_do_not_fit_before_the_next_hook_queue_up():
    """Four calls of 10 ns end every 10 ns; each costs 25 ns, of which the thread's 200 ns hold all 100."""
    calls = [(C.BACKEND, start, start + 10, "run", 0) for start in (0, 10, 20, 30)]
    found = corrected(profile(process([[(C.THREAD, 0, 200, "m", 0), *calls]])), Calibration({"call": 25}))
    assert table(found) == {
        (found.rows[0].cell, frozenset({"backend"})): 10,  # the first call; the others ran in what it cost
        (found.rows[0].cell, frozenset({"python"})): 200 - 10 - 100,
    }


def test_time_of_the_gpu_and_of_other_threads_stays_theirs():
    main = [(C.THREAD, 0, 100, "m", 0), (C.OPERATION, 0, 100, "act", 1), (C.BACKEND, 10, 20, "run", 0)]
    gpu = [(C.GPU_KERNEL, 25, 60, "gemm", 0)]
    found = corrected(profile(process([main, gpu])), Calibration({"call": 10}))
    by_set = {"+".join(sorted(row.categories)): row.ns for row in found.rows}
    # The hook took 20 to 30: 5 ns of it alone, 5 ns beside the kernel.
    assert by_set == {"python": 10 + 40, "backend": 10, "gpu_kernel": 5, "gpu_kernel+python": 30}


def test_a_library_s_own_profiling_is_removed_within_its_calls():
    main = [
        (C.THREAD, 0, 100, "m", 0),
        (C.GPU_RUNTIME, 10, 20, "cudaLaunchKernel", 0),
        (C.GPU_RUNTIME, 30, 40, "cudaMemcpyAsync", 0),
    ]
    costs = Calibration({}, {"cudaLaunchKernel": 3.0, "cudaMemcpyAsync": 1.0})
    found = corrected(profile(process([main])), costs)
    assert {row.cell.operation: row.ns for row in found.rows if "gpu_runtime" in row.categories} == {NONE: 16}
    assert sum(row.ns for row in found.rows) == 96


def test_the_cost_of_a_hook_is_the_difference_of_totals_by_its_count():
    blocks = [
        CalibrationBlock(1000),
        CalibrationBlock(1300, {"call": 100}),
        CalibrationBlock(1550, {"call": 100, "annotation": 25}),
        CalibrationBlock(1550, {"call": 100, "annotation": 25}),
        CalibrationBlock(1100, {"call": 200}),
        CalibrationBlock(1020),
    ]
    found = delta_calibration(blocks)
    # Plain: 1010 a block. Calls: (1300 + 1100 - 2020) / 300.
    assert found.hooks["call"] == pytest.approx(380 / 300)
    # Annotations: what two blocks take longer than plain ones, less their 200 calls.
    assert found.hooks["annotation"] == pytest.approx((1080 - 200 * 380 / 300) / 50)
    assert found.spread == pytest.approx(2**0.5 * 10 / 1010)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([CalibrationBlock(1000)], "at least 2 uninstrumented blocks, not 1"),
        (
            [CalibrationBlock(1000), CalibrationBlock(1050)],
            "2 uninstrumented blocks spread over 3.4 %, more than 2.4 %",
        ),
        ([CalibrationBlock(0), CalibrationBlock(0)], "spread over inf %"),
        (
            [CalibrationBlock(9), CalibrationBlock(9), CalibrationBlock(9, {"a": 1, "b": 1})],
            "costs of a and b cannot be told apart",
        ),
    ],
)
def test_blocks_that_give_no_cost_are_refused(blocks, message):
    with pytest.raises(CalibrationError, match=message):
        delta_calibration(blocks)


def test_a_cost_below_zero_is_noise():
    assert delta_calibration(
        [CalibrationBlock(1000), CalibrationBlock(1000), CalibrationBlock(990, {"call": 10})]
    ).hooks == {"call": 0.0}


def test_costs_of_calls_of_cuda_by_hand():
    """Copies to and from the device are one function; totals by calls, over all repeats."""
    first = {
        "cudaMemcpyAsync, to the device": CallTimes(2, 20, 60),
        "cudaMemcpyAsync, to the host": CallTimes(1, 10, 16),
    }
    second = {"cudaMemcpyAsync, to the device": CallTimes(1, 14, 20), "cudaEventRecord": CallTimes(5, 50, 40)}
    assert function_costs([first, second]) == {"cudaMemcpyAsync": (96 - 44) / 4, "cudaEventRecord": 0.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_calls_of_cuda_need_a_gpu():
    with pytest.raises(CalibrationError, match="calls of CUDA cannot be calibrated: torch sees no GPU here"):
        measured(repeats=1)


def test_each_kind_of_hook_has_its_own_cost_and_it_is_removed_from_who_paid_it():
    """Two intercepted calls of 100 ns, one activity of 300 ns, one annotation of 200 ns, in 2000 ns."""
    main = [
        (C.THREAD, 0, 2000, "main", 0),
        (
            C.OPERATION,
            100,
            1500,
            "act",
            1,
        ),  # 100 ns of its cost after 100, within it; 100 ns after 1500, outside
        (C.BACKEND, 300, 400, "torch.add", 0),  # its cost, 400 to 500, was the operation's Python
        (C.BACKEND, 520, 620, "torch.mul", 0),  # within the simulator's call, whose time its cost was
        (C.SIMULATOR, 510, 900, "step", 0, FROM_PYTHON),  # 900 to 1200
    ]
    nested = [*main[:3], (C.BACKEND, 520, 620, "torch.mul", 1), main[4]]
    costs = Calibration({"call": 100.0, "activity": 300.0, "annotation": 200.0})
    slow = profile(process([nested]))
    found = corrected(slow, costs)
    sums = {(row.cell.operation, *row.categories): row.ns for row in found.rows}
    assert sums == {
        ("act", "backend"): 100 + 100,
        ("act", "simulator"): 390 - 100 - 100,
        ("act", "python"): 1400 - 100 - 100 - 390 - 100 - 300,
        ("", "python"): 100 + 500 - 100,
    }
    assert found.removed_ns == 2 * 100 + 300 + 200
    assert sum(sums.values()) + found.removed_ns == 2000
    assert count_hooks(slow) == {PROCESS: 1, "call": 2, "activity": 1, "annotation": 1}
    assert costs.total_ns(count_hooks(slow)) == found.removed_ns


def test_no_category_gets_below_zero():
    """Four annotations of 1 ns each, at 1000 ns apiece, in a thread of 50 ns: nothing is left, and nothing is owed."""
    scopes = [(C.OPERATION, start, start + 1, "act", 1) for start in (10, 20, 30, 40)]
    found = corrected(
        profile(process([[(C.THREAD, 0, 50, "m", 0), *scopes]])), Calibration({"annotation": 1000.0})
    )
    assert {row.cell.operation: row.ns for row in found.rows} == {NONE: 10}  # before the first of them
    assert found.removed_ns == 40


def test_events_of_kinds_without_a_cost_are_counted(monkeypatch):
    """Also where several windows of time are read, one event each."""
    monkeypatch.setattr(overlap, "BLOCK_EVENTS", 1)
    monkeypatch.setattr(overlap, "WINDOW_BLOCKS", 1)
    main = [
        (C.THREAD, 0, 100, "main", 0),
        (C.OPERATION, 10, 60, "act", 0),
        (C.PHASE, 70, 90, "learn", 0),
        (C.BACKEND, 20, 30, "torch.ones", 0),
        (C.BACKEND, 40, 45, "torch.ones", 0),
        (C.WAIT, 75, 80, "barrier", 0, FROM_PYTHON),
    ]
    found = profile(process([main]))
    assert corrected(found, Calibration({})).uncorrected == {"call": 2, "annotation": 2, "activity": 1}
    assert corrected(found, Calibration({"call": 1.0, "activity": 1.0})).uncorrected == {"annotation": 2}
