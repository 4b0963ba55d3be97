"""Critical path, arrivals and advice, with times worked out by hand."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayagi.profiler.advice import advice
from rayagi.profiler.critical_path import Arrivals, PathPart, Visits, critical_path, segments
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.summary import report_text, waits
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import Category as C
from tests.unit.profiler.traces import process, profile


def gmi(name, pid, *events, end=100):
    """A process with one thread."""
    return process([[(C.THREAD, 0, end, "main", 0), *events]], name=name, pid=pid)


def iteration(number, start, end):
    return (C.ITERATION, start, end, "iteration", 1, number)


def operation(name, start, end):
    return (C.OPERATION, start, end, name, 2)


def reduce(start, end, name="all_reduce"):
    return (C.COMMUNICATION, start, end, name, 0)


def two_gmis():
    """
    time      0         10        20        30        40        50
    A         collect             |learn    (wait    )|reduce|
    B         collect   |(wait             )... arrives first, then last
    """
    a = gmi(
        "A", 1,
        iteration(0, 0, 50), operation("collect", 0, 20), reduce(20, 22), operation("learn", 22, 30),
        reduce(30, 44), operation("log", 44, 50),
    )  # fmt: skip
    b = gmi(
        "B", 2,
        iteration(0, 0, 46), operation("collect", 0, 10), reduce(10, 22), operation("learn", 22, 40),
        reduce(40, 44),
    )  # fmt: skip
    return profile(a, b)


def test_the_path_of_two_processes_by_hand():
    found = critical_path(two_gmis())
    # A until 20, both until 22, B until 40, both until 44, A until 50.
    assert (found.iterations, found.collectives, found.span_ns) == (1, 2, 50)
    assert set(found.parts) == {
        PathPart("A", "collect", 20),
        PathPart("", "all_reduce", 6),
        PathPart("B", "learn", 18),
        PathPart("A", "log", 6),
    }
    assert found.arrivals == (
        Arrivals(
            "A", last=1, straggles=1, waited_ns=10, delayed_ns=10
        ),  # on the path for 20 + 2 + 6, B for 18 + 4
        Arrivals("B", last=1, straggles=0, waited_ns=10, delayed_ns=10),
    )


def test_tables_and_page_show_it():
    given_profile = two_gmis()
    found, causes, path = breakdown(given_profile), waits(given_profile), critical_path(given_profile)
    sentences = advice(given_profile, found, causes, path)
    text = report_text(given_profile, found, causes, path=path, advice=sentences)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "critical path of 1 iteration with 2 collectives of 2 processes" in lines
    assert "A collect 20 ns 40.0 %" in lines
    assert "all all_reduce 6 ns 12.0 %" in lines
    assert "A 50.0 % 100.0 % 10 ns 10 ns" in lines
    assert (
        "- collect is 40.0% of the critical path: a tenth less of it makes an iteration 4.0% shorter" in lines
    )
    assert "- all_reduce itself, after the last process has arrived, is 12.0% of the critical path" in lines
    page = report_page(given_profile, found, causes, timeline(given_profile), path=path, advice=sentences)
    assert "<h2>Critical path</h2>" in page
    assert "<li>collect is 40.0% of the critical path" in page


def test_one_that_is_always_late_is_named_as_the_straggler():
    slow = gmi("slow", 1, iteration(0, 0, 92), operation("collect", 0, 90), reduce(90, 91))
    fast = [
        gmi(name, pid, iteration(0, 0, 92), operation("collect", 0, 60), reduce(60, 91))
        for name, pid in (("b", 2), ("c", 3))
    ]
    found = profile(slow, *fast)
    path = critical_path(found)
    assert path.arrivals[0] == Arrivals("slow", last=1, straggles=1, waited_ns=0, delayed_ns=60)
    first, *_ = advice(found, breakdown(found), waits(found), path)
    assert first == (
        "slow is the straggler of 100% of iterations; each of the others waits for it 30 ns an iteration (32.6%): "
        "give it fewer environments, or more cores"
    )


def test_waits_and_python_are_advice_without_a_path():
    alone = gmi(
        "trainer",
        1,
        operation("learn", 0, 60),
        (C.WAIT, 60, 91, "experience", 0),
        operation("learn", 91, 100),
    )
    found = profile(alone)
    assert critical_path(found) is None
    assert advice(found, breakdown(found), waits(found), None) == [
        "trainer waits for experience 31.0% of its time",
        "learn spends 100% of its time in Python alone, 69.0% of all: larger batches, or fewer calls",
    ]


def test_only_what_all_did_alike_counts():
    a = gmi(
        "A", 1, iteration(0, 0, 10), reduce(4, 6), iteration(1, 10, 20), reduce(14, 16), iteration(2, 20, 30)
    )
    b = gmi("B", 2, iteration(1, 10, 20), reduce(12, 16), iteration(2, 20, 30))
    other = gmi("other", 3, iteration(1, 10, 20), reduce(11, 12, "all_gather"))
    found = critical_path(profile(a, b, other))
    # Iteration 0 was recorded by one alone, iteration 2 has no collective; "other" does something else in iteration 1.
    assert (found.iterations, found.collectives) == (1, 1)
    assert [each.process for each in found.arrivals] == ["A", "B"]
    assert critical_path(profile(a)) is None
    assert critical_path(profile()) is None


def test_collectives_that_overlap_have_nothing_between_them():
    a, b = (
        gmi(name, pid, iteration(0, 0, 30), reduce(4, 9), reduce(7, 12)) for name, pid in (("A", 1), ("B", 2))
    )
    found = critical_path(profile(a, b))
    assert {(part.process, part.ns) for part in found.parts} == {("A", 4 + 18), ("", 5 + 5)}


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda members: st.lists(
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=members, max_size=members),
            max_size=5,
        ).map(lambda rounds: (members, rounds))
    ),
    st.integers(0, 9),
)
def test_the_path_has_no_gaps_and_ends_with_the_last(case, tail):
    """Collectives that end for all at once: the path is then as long as the iteration."""
    members, rounds = case
    now, arrived, left = 0, [], []
    for work in rounds:
        times = [now + own for own, _ in work]
        now = max(times) + 1
        arrived.append(times)
        left.append([now] * members)
    shape = (len(rounds), members)
    ends = np.full(members, now + tail)
    visits = Visits(
        np.zeros(members, np.int64),
        ends,
        np.array(arrived, np.int64).reshape(shape).T,
        np.array(left, np.int64).reshape(shape).T,
    )
    path = segments(visits)
    assert path[0].start == 0
    assert all(one.end == other.start for one, other in pairwise(path))
    assert path[-1].end == now + tail
    assert [each.meeting for each in path if each.meeting >= 0] == [*range(len(rounds))]


def test_a_thread_s_recordings_are_one_process():
    """A schedule that repeats gives a thread a file for each window."""
    windows = []
    for who in range(2):
        files = []
        for number in range(3):
            at = 1000 * number
            files.append(
                [
                    (C.THREAD, at, at + 100, "main", 0),
                    iteration(number, at, at + 100),
                    operation("collect", at, at + 20 + who),
                    reduce(at + 20 + who, at + 22),
                ]
            )
        each = process(files, name="AB"[who], pid=who + 1)
        windows.append(replace(each, threads=tuple(replace(one, thread_id=7) for one in each.threads)))
    found = critical_path(profile(*windows))
    assert (found.iterations, found.collectives, found.span_ns) == (3, 3, 300)
    # B arrives last, at 21; after 22 no operation is open.
    assert set(found.parts) == {
        PathPart("B", "collect", 63),
        PathPart("", "all_reduce", 3),
        PathPart("A", "", 234),
    }


def test_iterations_within_others_do_not_count():
    """They are recorded with the number of the outer one."""
    members = [
        gmi(name, pid, iteration(0, 0, 50), iteration(0, 5, 6), reduce(20 + pid, 30))
        for pid, name in ((1, "A"), (2, "B"))
    ]
    found = critical_path(profile(*members))
    assert (found.iterations, found.collectives, found.span_ns) == (1, 1, 50)


def test_python_on_less_than_a_core_may_be_a_call_that_blocks():
    blocks = (
        "on 0.45 cores on average, so part of it is a call that blocks, such as sleep or input "
        "(rayagi profile --native time --native select shows some)"
    )
    events = [(C.THREAD, 0, 100, "main", 0), operation("read", 0, 100)]
    for cpu_ns, reason in ((45, blocks), (95, "larger batches, or fewer calls")):
        found = profile(process([events], cores={"wall_ns": 100, "cpu_ns": cpu_ns}))
        assert advice(found, breakdown(found), [], None) == [
            f"read spends 100% of its time in Python alone, 100.0% of all: {reason}"
        ]


def advised(*processes):
    """What is said after the colon."""
    found = profile(*processes)
    (sentence,) = advice(found, breakdown(found), [], None)
    return sentence.partition(": ")[2]


def worker(pid, name="work", **cores):
    events = (
        [(C.THREAD, 0, 100, "main", 0), operation(name, 0, 100)] if name else [(C.THREAD, 0, 100, "main", 0)]
    )
    return process([events], pid=pid, cores=cores)


def test_python_without_a_core_is_not_called_blocked():
    """Of 100 ns, 20 on a core and 70 ready for one; or 20 and 30, so that 50 are left for a call that blocks."""
    others = "its processes were ready without a core for 70% of their time, since others had the cores"
    assert advised(worker(1, wall_ns=100, cpu_ns=20, queue_ns=70)).startswith(others)
    assert advised(worker(1, wall_ns=100, cpu_ns=20, queue_ns=30)).startswith("on 0.20 cores on average")


def test_only_processes_that_have_the_operation_count_and_those_with_figures():
    waiting_parent = worker(1, "", wall_ns=100, cpu_ns=0, queue_ns=0)
    killed = worker(2)
    assert advised(waiting_parent, killed) == "larger batches, or fewer calls"
    busy = worker(3, wall_ns=100, cpu_ns=95, queue_ns=5)
    assert advised(waiting_parent, killed, busy) == "larger batches, or fewer calls"
    sleeping = worker(4, wall_ns=100, cpu_ns=5, queue_ns=0)
    assert advised(waiting_parent, killed, busy, sleeping).startswith("on 0.50 cores on average")
