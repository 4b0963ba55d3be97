"""The overlap of categories: hand-worked cases, and a sweep in plain Python that looks at every nanosecond."""

from collections import Counter
from dataclasses import replace
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rayagi.profiler import overlap
from rayagi.profiler.overlap import NO_ITERATION, NONE, breakdown, clock_offsets, resource
from rayagi.profiler.summary import report_text
from rayagi.profiler.trace import Category as C
from rayagi.profiler.trace import TraceError
from tests.unit.profiler.traces import process, profile

END = 24
"""Times of the random traces are below it."""


def times(rows, process="trainer"):
    """(phase, iteration, operation, categories joined by +) -> ns."""
    return {
        (row.cell.phase, row.cell.iteration, row.cell.operation, "+".join(sorted(row.categories))): row.ns
        for row in rows
        if row.cell.process == process
    }


def by_operation(rows, process="trainer"):
    return {(operation, categories): ns for (_, _, operation, categories), ns in times(rows, process).items()}


def test_the_paper_s_figure_of_overlap():
    """Figure 3: mcts_tree_search is Python; in it, expand_leaf calls a backend, which starts kernels that outlast it."""
    cpu = [
        (C.THREAD, 0, 100, "main", 0),
        (C.OPERATION, 10, 80, "mcts_tree_search", 1),
        (C.OPERATION, 30, 70, "expand_leaf", 2),
        (C.GPU_RUNTIME, 40, 45, "cudaLaunchKernel", 1),
        (C.BACKEND, 35, 60, "session.run", 0),
    ]
    gpu = [(C.GPU_KERNEL, 42, 65, "gemm", 0), (C.GPU_COPY, 63, 75, "memcpy", 0)]
    found = breakdown(profile(process([cpu, gpu])))
    assert by_operation(found.rows) == {
        (NONE, "python"): 10 + 20,
        ("mcts_tree_search", "python"): 20 + 5,  # 10-30, 75-80
        ("mcts_tree_search", "gpu_copy+python"): 5,  # 70-75
        ("expand_leaf", "python"): 5,  # 30-35
        ("expand_leaf", "backend"): 5,  # 35-40
        ("expand_leaf", "gpu_runtime"): 2,  # 40-42
        ("expand_leaf", "gpu_kernel+gpu_runtime"): 3,  # 42-45
        ("expand_leaf", "backend+gpu_kernel"): 15,  # 45-60
        ("expand_leaf", "gpu_kernel+python"): 3,  # 60-63
        ("expand_leaf", "gpu_copy+gpu_kernel+python"): 2,  # 63-65
        ("expand_leaf", "gpu_copy+python"): 5,  # 65-70
    }
    resources = Counter()
    for row in found.rows:
        resources[row.cell.operation, resource(row.categories)] += row.ns
    assert resources["expand_leaf", "cpu"] == 5 + 5 + 2
    assert resources["expand_leaf", "cpu+gpu"] == 3 + 15 + 3 + 2 + 5
    entered = {(each.cell.operation, each.source, each.target): n for each, n in found.transitions.items()}
    assert entered == {
        ("expand_leaf", "python", "backend"): 1,
        ("expand_leaf", "backend", "gpu_runtime"): 1,
    }


def test_threads_without_an_operation_work_for_the_one_that_has():
    main = [
        (C.THREAD, 0, 100, "main", 0),
        (C.OPERATION, 20, 60, "backpropagation", 1),
        (C.WAIT, 20, 60, "", 0),
    ]
    backward = [
        (C.THREAD, 0, 100, "autograd", 0),
        (C.BACKEND, 30, 50, "run", 0),
        (C.BACKEND, 70, 75, "run", 0),
    ]
    found = breakdown(profile(process([main, backward])))
    assert by_operation(found.rows) == {
        (NONE, "python"): 20 + 40 - 5,
        (NONE, "backend+python"): 5,
        ("backpropagation", "wait"): 20,  # the Python of the thread that idles is not the operation's
        ("backpropagation", "backend+wait"): 20,
    }
    assert {(each.cell.operation, each.target): number for each, number in found.transitions.items()} == {
        ("backpropagation", "wait"): 1,
        ("backpropagation", "backend"): 1,
        (NONE, "backend"): 1,
    }


def test_operations_of_two_threads_each_have_their_time_and_the_total_has_it_once():
    act = [(C.THREAD, 0, 50, "a", 0), (C.OPERATION, 0, 30, "act", 1), (C.SIMULATOR, 5, 25, "step", 0)]
    learn = [(C.THREAD, 0, 50, "b", 0), (C.OPERATION, 10, 40, "learn", 1), (C.BACKEND, 15, 35, "run", 0)]
    found = breakdown(profile(process([act, learn])))
    assert by_operation(found.rows) == {
        ("act", "python"): 10,
        ("act", "simulator"): 20,
        ("learn", "python"): 10,
        ("learn", "backend"): 20,
        (NONE, "python"): 10,
    }
    total = {"+".join(sorted(categories)): ns for categories, ns in found.totals["trainer"].items()}
    # act 0-30 with step 5-25; learn 10-40 with run 15-35; neither 40-50. Between 25 and 30 one is in Python.
    # Thread a: Python, simulator from 5 to 25. Thread b is idle until 10, then Python, backend from 15 to 35, Python.
    assert total == {
        "python": 5 + 5 + 10,  # 0-5, 35-40, and no operation from 40 to 50
        "simulator": 5,  # 5-10
        "python+simulator": 5,  # 10-15
        "backend+simulator": 10,  # 15-25
        "backend+python": 5,  # 25-30
        "backend": 5,  # 30-35
    }
    assert sum(total.values()) == 50


def test_the_same_operation_in_two_threads_counts_once():
    first = [(C.THREAD, 0, 20, "a", 0), (C.OPERATION, 0, 10, "act", 1)]
    second = [(C.THREAD, 0, 20, "b", 0), (C.OPERATION, 5, 15, "act", 1)]
    found = breakdown(profile(process([first, second])))
    assert by_operation(found.rows) == {("act", "python"): 15, (NONE, "python"): 5}


def test_phases_and_iterations_are_the_process_s():
    main = [
        (C.THREAD, 0, 100, "main", 0),
        (C.PHASE, 10, 90, "training", 1),
        (C.ITERATION, 20, 50, "iteration", 2, 65535),
        (C.OPERATION, 40, 60, "update", 3),
        (C.ITERATION, 50, 80, "iteration", 2, 0),
    ]
    other = [(C.THREAD, 0, 100, "other", 0), (C.OPERATION, 5, 15, "log", 1)]
    found = breakdown(profile(process([main, other])))
    assert times(found.rows) == {
        ("", -1, NONE, "python"): 5 + 10,
        ("", -1, "log", "python"): 5,
        ("training", -1, "log", "python"): 5,
        ("training", -1, NONE, "python"): 5 + 10,
        ("training", 65535, NONE, "python"): 20,
        ("training", 65535, "update", "python"): 10,
        ("training", 65536, "update", "python"): 10,
        ("training", 65536, NONE, "python"): 20,
    }


def test_what_a_killed_process_left_open_ends_with_its_last_event():
    main = [(C.PROCESS, 0, 0, "p", 0), (C.THREAD, 10, 0, "main", 0), (C.OPERATION, 20, 0, "act", 1)]
    other = [(C.THREAD, 30, 60, "other", 0), (C.BACKEND, 40, 55, "run", 0)]
    found = breakdown(profile(process([main, other])))
    assert by_operation(found.rows) == {
        (NONE, "python"): 10,
        ("act", "python"): 25,
        ("act", "backend+python"): 15,
    }
    (summary,) = found.processes
    assert (summary.life_ns, summary.unaccounted_ns) == (60, 10)


def test_processes_of_another_host_are_put_on_one_clock():
    """Two processes are in `act` at the same Unix time, 5 ns apart; their monotonic clocks differ by 1000."""
    here = process([[(C.THREAD, 0, 10, "m", 0), (C.OPERATION, 0, 10, "act", 1)]], "a", clock=(0, 7_000))
    events = [(C.THREAD, 1005, 1015, "m", 0), (C.OPERATION, 1005, 1015, "act", 1)]
    there = process([events], "b", pid=42, host="far-away", clock=(1_000, 7_000))
    found = breakdown(profile(here, there))
    assert by_operation(found.merged, process="") == {("act", "python"): 15}
    assert by_operation(found.rows, process="b") == {("act", "python"): 10}


def test_empty_profiles_and_processes_without_events():
    assert breakdown(profile()).rows == ()
    found = breakdown(profile(process([])))
    assert (found.rows, found.processes[0].life_ns) == ((), 0)


def test_labels_of_processes_are_distinct():
    same = [process([], "gmi", pid=1), process([], "gmi", pid=2), process([], "gmi", pid=2, host="b")]
    labels = overlap.process_labels([*same, process([], "")])
    assert labels == ["gmi 1", "gmi 2 host-2-7", "gmi 2 b-2-7", " 41"]


def test_sums_above_2_53_are_exact():
    far = 2**55 + 1
    main = [(C.THREAD, 0, far, "m", 0), (C.OPERATION, 1, far - 1, "act", 1)]
    found = breakdown(profile(process([main])))
    assert by_operation(found.rows) == {(NONE, "python"): 2, ("act", "python"): far - 2}


def test_times_that_are_years_apart_are_damage():
    with pytest.raises(TraceError, match="host-41-7 is damaged: its events are 37 years apart"):
        breakdown(profile(process([[(C.THREAD, 0, 2**60, "m", 0)]])))
    for start, end in ((0, 2**62), (-(2**63), 2**63 - 1)):
        with pytest.raises(TraceError, match=r"1-0\.events is damaged: it has an event at"):
            breakdown(profile(process([[(C.THREAD, start, end, "m", 0)]])))


def test_processes_whose_clocks_are_years_apart_are_damage():
    here, there = (
        process([[(C.THREAD, 0, 9, "m", 0)]], host=host, clock=(0, at))
        for host, at in (("a", 0), ("b", 2**60))
    )
    with pytest.raises(TraceError, match="profile is damaged: its events are 37 years apart"):
        breakdown(profile(here, there))
    with pytest.raises(TraceError, match="one of its clocks is at 1000000"):
        breakdown(profile(process([], clock=(0, 10**400))))


@pytest.mark.parametrize(
    ("categories", "expected"),
    [("python wait", "cpu"), ("wait", "wait"), ("wait gpu_copy", "gpu"), ("backend gpu_kernel", "cpu+gpu")],
)
def test_a_wait_alone_uses_neither_cpu_nor_gpu(categories, expected):
    assert resource(frozenset(categories.split())) == expected


# Against a sweep that looks at every nanosecond.

spans = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))
natives = st.tuples(
    st.sampled_from([C.SIMULATOR, C.BACKEND, C.WAIT, C.GPU_RUNTIME, C.GPU_KERNEL, C.GPU_COPY]), spans
)
scopes = st.tuples(
    st.sampled_from([C.OPERATION, C.OPERATION, C.PHASE, C.ITERATION]),
    spans,
    st.sampled_from("xyz"),
    st.booleans(),
)


@st.composite
def threads(draw):
    """Events that need not nest, with depths by how many contain them, or at random."""
    start, end = draw(spans)
    events = [(C.THREAD, start, draw(st.sampled_from([0, max(end, 1)])), "t", 0)]
    for category, (low, high), name, opened in draw(st.lists(scopes, max_size=5)):
        events.append((category, low, 0 if opened else max(high, 1), name, 1, ord(name)))
    inner = [
        (category, max(high, low + 1), low) for category, (low, high) in draw(st.lists(natives, max_size=6))
    ]
    deep = draw(st.booleans())
    for category, high, low in inner:
        around = sum(a <= low and high <= b and (a, b) != (low, high) for _, b, a in inner)
        events.append((category, low, high, "n", around if deep else draw(st.integers(0, 3))))
    return events


def moments(traces):
    """For each whole time, {(phase, iteration, operation): categories} of one process."""
    last = max((max(start, end) for trace in traces for _, start, end, *_ in trace), default=0)
    closed = []
    for trace in traces:
        own = [end or last for category, _, end, *_ in trace if category == C.THREAD]
        end_of_thread = max([*own, *(end for category, _, end, *_ in trace if category >= 16)])
        closed.append(
            [
                (category, start, end or max(end_of_thread, start), name, depth)
                for category, start, end, name, depth, *_ in trace
            ]
        )
    return [_moment(closed, time) for time in range(last)]


def _moment(traces, time):
    def top(events):
        ranked = [(each[1], -each[2], each[4], index, each) for index, each in enumerate(events)]
        return max((rank for rank in ranked if rank[0] <= time < -rank[1]), default=[None])[-1]

    everything = [each for trace in traces for each in trace]
    phase, iteration = (
        top([each for each in everything if each[0] == kind]) for kind in (C.PHASE, C.ITERATION)
    )
    on_gpu = (C.GPU_KERNEL, C.GPU_COPY)
    gpu = {C(each[0]).name.lower() for each in everything if each[0] in on_gpu and each[1] <= time < each[2]}
    states = []
    for trace in traces:
        kinds = {each[0] for each in trace if each[0] >= 16}
        ends = [each[2] for each in trace if each[0] == C.THREAD or each[0] >= 16]
        alive = min(each[1] for each in trace) <= time < max(ends)
        if not alive or (kinds and kinds <= set(on_gpu)):
            continue
        native = top([each for each in trace if each[0] >= 16 and each[0] not in on_gpu])
        operation = top([each for each in trace if each[0] == C.OPERATION])
        states.append(
            (operation[3] if operation else None, C(native[0]).name.lower() if native else "python")
        )
    lent = {category for operation, category in states if operation is None and category != "python"}
    sets = {
        name: {category for operation, category in states if operation == name} | lent | gpu
        for name in {operation for operation, _ in states if operation}
    }
    if not sets:
        sets[NONE] = {category for _, category in states} | gpu
    outer = phase[3] if phase else "", ord(iteration[3]) if iteration else -1
    return {(*outer, name): active for name, active in sets.items() if active}


def together(several):
    """The union of what is active in several processes at a time, by cell."""
    return [
        {
            cell: set().union(*(each.get(cell, ()) for each in at_a_time))
            for cell in {cell for each in at_a_time for cell in each}
        }
        for at_a_time in zip_longest(*several, fillvalue={})
    ]


def counted(sets_over_time):
    """Counts of (phase, iteration, operation, categories), and of categories whatever the cell."""
    cells, total = Counter(), Counter()
    for sets in sets_over_time:
        cells.update((*cell, "+".join(sorted(active))) for cell, active in sets.items())
        if everywhere := set().union(*sets.values()):
            total["+".join(sorted(everywhere))] += 1
    return cells, total


@pytest.mark.parametrize(("block", "window"), [(1 << 16, 32), (2, 1)])
@settings(max_examples=50, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.lists(threads(), min_size=1, max_size=3), min_size=1, max_size=2))
def test_every_nanosecond_is_where_a_plain_sweep_puts_it(block, window, processes):
    kept = overlap.BLOCK_EVENTS, overlap.WINDOW_BLOCKS
    overlap.BLOCK_EVENTS, overlap.WINDOW_BLOCKS = block, window
    try:
        found = breakdown(profile(*(process(each, str(number)) for number, each in enumerate(processes))))
    finally:
        overlap.BLOCK_EVENTS, overlap.WINDOW_BLOCKS = kept
    several = [moments(traces) for traces in processes]
    expected = {str(number): counted(each) for number, each in enumerate(several)} | {
        "": counted(together(several))
    }
    for label, (cells, total) in expected.items():
        assert times(found.rows if label else found.merged, label) == cells
        assert {"+".join(sorted(key)): ns for key, ns in found.totals[label].items()} == total


def test_windows_that_threads_compute_give_the_same_sums_and_errors_come_through(monkeypatch):
    rng = np.random.default_rng(7)
    found = []
    for pid in (1, 2):
        lists = []
        for _ in range(3):
            ends = np.cumsum(rng.integers(2, 40, 3000))
            kinds = rng.choice([C.SIMULATOR, C.BACKEND, C.GPU_KERNEL, C.OPERATION], 3000)
            lists.append(
                [
                    (int(kind), int(end) - 1 - int(end) % 2, int(end), f"n{kind}", 0)
                    for end, kind in zip(ends, kinds, strict=True)
                ]
            )
        found.append(process(lists, f"p{pid}", pid=pid))
    monkeypatch.setattr(overlap, "BLOCK_EVENTS", 64)
    monkeypatch.setattr(overlap, "WINDOW_BLOCKS", 4)
    results = []
    for cores in ({0}, {0, 1, 2}):
        monkeypatch.setattr(overlap.os, "sched_getaffinity", lambda pid, cores=cores: cores)
        results.append(breakdown(profile(*found)))
    assert results[0] == results[1]
    assert len(results[0].rows) > 10

    def unreadable(self, window):
        raise TraceError(f"no window {window[0] >= 0}")

    monkeypatch.setattr(overlap._Sums, "measured", unreadable)
    with pytest.raises(TraceError, match="no window True"):
        breakdown(profile(*found))


def test_a_process_that_replaced_its_program_has_its_host_s_clock():
    """Its folder has a further number. By the wall clock, set between their starts, they would be half a second apart."""
    first = process([[(C.THREAD, 0, 100, "main", 0)]], pid=1, clock=(0, 0))
    second = process([[(C.THREAD, 0, 100, "main", 0)]], pid=2, clock=(0, 500_000_000))
    second = replace(second, path=second.path.with_name(second.path.name + "-2"))
    assert clock_offsets((first, second)) == [0, 0]


def cut_off(dropped_from, dropped=7):
    """A process whose thread drops events from a time on."""
    main = [
        (C.THREAD, 0, 100, "main", 0),
        (C.PROCESS, 0, 100, "trainer", 0),
        (C.OPERATION, 10, 40, "many", 0),
        (C.BACKEND, 20, 30, "torch.ones", 0),
        (C.OPERATION, 45, 90, "heavy", 0),
        (C.ITERATION, 5, 95, "iteration", 0),
    ]
    made = process([main])
    (thread,) = made.threads
    return replace(made, threads=(replace(thread, dropped=dropped, dropped_from_ns=dropped_from),))


def test_time_after_the_first_dropped_event_is_not_recorded():
    """A call that took from 50 on was dropped: that time is neither Python's nor of an operation."""
    found = breakdown(profile(cut_off(50)))
    assert times(found.rows) == {
        (NONE, NO_ITERATION, NONE, "python"): 5,
        (NONE, 0, NONE, "python"): 5 + 5,
        (NONE, 0, "many", "python"): 20,
        (NONE, 0, "many", "backend"): 10,
        (NONE, 0, "heavy", "python"): 5,
    }
    (summary,) = found.processes
    assert (summary.life_ns, summary.unaccounted_ns) == (100, 50)
    assert (summary.dropped, summary.cut_threads, summary.threads) == (7, 1, 1)
    text = report_text(profile(cut_off(50)), found, [])
    assert (
        "not recorded: 50 ns (50.0 %); dropped 7 events: 1 of 1 thread not recorded from the first of them on"
        in text
    )


def test_recordings_that_do_not_say_when_they_dropped_are_read_as_before():
    found = breakdown(profile(cut_off(0)))
    assert times(found.rows)[NONE, 0, "heavy", "python"] == 45
    (summary,) = found.processes
    assert (summary.unaccounted_ns, summary.dropped, summary.cut_threads) == (0, 7, 0)


def test_a_thread_that_dropped_before_its_start_has_no_time():
    """A damaged header; or the first event of all, that began earlier, is dropped."""
    for dropped_from in (-(1 << 62), 1):
        (summary,) = breakdown(profile(cut_off(dropped_from))).processes
        assert summary.unaccounted_ns == 100 - max(0, dropped_from)


def killed(end_ns=0, clock=(0, 0), host="host"):
    """A process that was killed in an operation: its last event is over at 30."""
    main = [
        (C.THREAD, 0, 0, "main", 0),
        (C.PROCESS, 0, 0, "trainer", 0),
        (C.OPERATION, 10, 0, "learn", 0),
        (C.BACKEND, 20, 30, "torch.ones", 0),
    ]
    return process([main], host=host, pid=len(host), clock=clock, end_ns=end_ns)


def test_a_killed_process_is_counted_to_its_end():
    found = breakdown(profile(killed(end_ns=150)))
    assert by_operation(found.rows) == {
        (NONE, "python"): 10,
        ("learn", "python"): 10 + 120,
        ("learn", "backend"): 10,
    }
    (summary,) = found.processes
    assert (summary.life_ns, summary.unaccounted_ns) == (150, 0)
    assert "trainer: 150 ns, 1 thread; killed\n" in report_text(profile(killed(150)), found, [])


def test_the_end_of_a_killed_process_is_on_its_own_clock():
    """Another host's monotonic clock is 1000 behind the first one's."""
    found = breakdown(
        profile(process([[(C.THREAD, 1000, 1200, "main", 0)]]), killed(150, (0, 1000), "other"))
    )
    assert [each.life_ns for each in found.processes] == [200, 150]


def test_a_killed_process_without_a_known_end_says_so():
    found = breakdown(profile(killed()))
    (summary,) = found.processes
    assert (summary.life_ns, summary.is_killed, summary.end_is_known) == (30, True, False)
    text = report_text(profile(killed()), found, [])
    assert "30 ns, 1 thread; killed, or still running: unknown after its last event\n" in text


def test_a_thread_without_an_end_is_counted_to_that_of_its_process():
    """It made its file just as recording ended."""
    found = breakdown(profile(replace(killed(end_ns=150), has_ended=True)))
    assert (found.processes[0].life_ns, found.processes[0].is_killed) == (150, False)


def test_the_end_of_a_process_is_not_that_of_a_thread_that_ended_before():
    thread = [(C.THREAD, 0, 40, "main", 0), (C.OPERATION, 10, 0, "learn", 0)]
    found = breakdown(profile(process([thread], end_ns=150)))
    assert by_operation(found.rows) == {(NONE, "python"): 10, ("learn", "python"): 30}
    assert not found.processes[0].is_killed
