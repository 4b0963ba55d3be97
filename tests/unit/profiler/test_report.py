"""Tables, page and comparison of profiles whose times are worked out by hand."""

import json
import re
import tracemalloc
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from scipy import stats

from rayagi.cli import main
from rayagi.cli.profile import summarize
from rayagi.profiler.advice import advice
from rayagi.profiler.difference import difference_text, differences, holm, permutation_p_values
from rayagi.profiler.overlap import Breakdown, Cell, Row, breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.summary import (
    Wait,
    num_iterations,
    operation_times,
    recorded,
    report_text,
    seconds,
    transition_rows,
    waits,
)
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import Category as C
from rayagi.profiler.trace import read_profile
from tests.unit.profiler.traces import process, profile, write

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\ud800\u202e"
MS = 1_000_000


def iterations(lengths, name="act", number=1):
    """One process: in each iteration an operation of that many ms, half of it in the simulator, then 1 ms of Python."""
    events, time = [], 0
    for index, ms in enumerate(lengths):
        end = time + (ms + 1) * MS
        events += [
            (C.ITERATION, time, end, "iteration", 1, index),
            (C.OPERATION, time, time + ms * MS, name, 2),
            (C.SIMULATOR, time, time + ms * MS // 2, "mj_step", 0),
        ]
        time = end
    return process([[(C.THREAD, 0, time, "main", 0), *events]], f"gmi {number}", pid=number)


def waiting(name=HOSTILE):
    main_thread = [
        (C.THREAD, 0, 10 * MS, "main", 0),
        (C.PHASE, 0, 10 * MS, "training", 1),
        (C.OPERATION, MS, 5 * MS, name, 2),
        (C.WAIT, 2 * MS, 4 * MS, name, 0),
        (C.WAIT, 6 * MS, 9 * MS, "barrier: GMI 1", 0),
        (C.WAIT, 9 * MS, 10 * MS, "barrier: GMI 1", 0),
        (C.GPU_KERNEL, 3 * MS, 4 * MS, "gemm", 0),
    ]
    return profile(process([main_thread], name))


def test_waits_are_summed_by_cause():
    first, second = waits(waiting("x"))
    assert (first.cause, first.count, first.total_ns, first.longest_ns) == (
        "barrier: GMI 1",
        2,
        4 * MS,
        3 * MS,
    )
    assert (second.process, second.category, second.cause, second.total_ns) == ("x", "wait", "x", 2 * MS)


def test_the_text_has_times_shares_and_transitions():
    found = profile(iterations([4, 4]))
    lines = [" ".join(line.split()) for line in report_text(found, breakdown(found), []).splitlines()]
    assert lines[2] == "gmi 1: 10 ms, 1 thread, 2 iterations"
    # act: 8 of 10 ms, of which 4 are the simulator's; the rest is Python.
    assert lines[3:6] == [
        "operation time share cpu python simulator",
        "act 8 ms 80.0 % 100.0 % 50.0 % 50.0 %",
        "(outside operations) 2 ms 20.0 % 100.0 % 100.0 % 0.0 %",
    ]
    assert lines[-1] == "act python -> simulator 2 1.0"


def test_only_waits_that_take_time_are_in_the_text():
    found = profile(iterations([4, 4]))  # 10 ms
    own = recorded(breakdown(found))[0].label
    long, *short = (
        Wait(own, "wait", f"cause {index}", 3, ns, ns, 1) for index, ns in enumerate([MS, 99_000, 50_000])
    )
    lines = [
        " ".join(line.split()) for line in report_text(found, breakdown(found), [long, *short]).splitlines()
    ]
    begin = lines.index("waits by cause")
    assert lines[begin + 1 : begin + 4] == [
        "process category cause count threads total share longest",
        f"{own} wait cause 0 3 1 1 ms 10.0 % 1 ms",
        "left out: 2 shorter causes; the page has all",
    ]
    lines = report_text(found, breakdown(found), [short[0]]).splitlines()
    assert lines[lines.index("waits by cause") + 1] == "left out: 1 shorter cause; the page has all"


def test_threads_that_wait_at_a_time_have_a_share_of_their_own_time():
    """Two of three wait for 6 and 4 of 10 ms, one of them in two recordings."""
    main_thread = [(C.THREAD, 0, 10 * MS, "main", 0)]
    times = (0, 6), (2, 5), (6, 7)
    waiting_threads = [[*main_thread, (C.WAIT, start * MS, end * MS, "queue", 0)] for start, end in times]
    made = process([main_thread, *waiting_threads])
    *others, last = made.threads
    found = profile(replace(made, threads=(*others, replace(last, thread_id=3))))
    rows, causes = breakdown(found), waits(found)
    assert [(each.count, each.threads, each.total_ns, each.mean_ns) for each in causes] == [
        (3, 2, 10 * MS, 5 * MS)
    ]
    text = report_text(found, rows, causes)
    assert "trainer wait queue 3 2 10 ms 50.0 % 6 ms" in [
        " ".join(line.split()) for line in text.splitlines()
    ]
    assert advice(found, rows, causes, None) == [
        "trainer waits for queue 50.0% of its time, on average of 2 threads"
    ]


def test_transitions_outside_of_iterations_are_not_per_iteration():
    (warm_up,) = process([[(C.BACKEND, 10 * MS, 11 * MS, "save", 0)]]).threads
    trained = iterations([4, 4])
    found = breakdown(profile(replace(trained, threads=(*trained.threads, replace(warm_up, thread_id=2)))))
    by_transition = {transition: numbers for _, transition, *numbers in transition_rows(found)}
    assert by_transition == {"python -> simulator": ["2", "1.0"], "python -> backend": ["1", "0.0"]}


def test_resources_of_an_operation():
    (operation,) = (
        each for each in operation_times(breakdown(waiting("x")).rows) if each.name == "training / x"
    )
    found = {name: operation.resource_ns(name) for name in ("cpu", "cpu+gpu", "gpu", "wait")}
    assert found == {"cpu": 2 * MS, "cpu+gpu": 0, "gpu": MS, "wait": MS}


def test_terminals_and_pages_get_no_control_of_a_name():
    found = waiting()
    rows, causes = breakdown(found), waits(found)
    text = report_text(found, rows, causes)
    page = report_page(found, rows, causes, timeline(found))
    for each in (text, page):
        assert each.encode()
        assert not {"\x1b", "\u202e", "\\u001b", "\\u202e"} & set(re.findall(r"\\u....|.", each))
    assert "alert(1)</script>" not in page
    assert page.count("<script") == page.count("</script>") == 2


class Checker(HTMLParser):
    """Collects open elements, and what would load something."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.data = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "canvas"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "canvas":
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"] and data.startswith("{"):
            self.data = data


def test_the_page_is_well_formed_and_loads_nothing():
    found = profile(iterations([4, 4]), iterations([2, 6], number=2))
    page = report_page(found, breakdown(found), [], timeline(found, num_bins=10))
    checker = Checker()
    checker.feed(page)
    assert (checker.open, checker.loads) == ([], [])
    assert not re.search(r"https?://|@import|url\(", page)
    data = json.loads(checker.data)
    assert data["span"] == 10 * MS
    assert [lane["name"] for lane in data["lanes"]] == ["gmi 1, thread 1", "gmi 2, thread 1"]
    assert data["lanes"][1]["slices"][2:4] == [[3 * MS, 10 * MS, 0, 0], [3 * MS, 9 * MS, 1, 1]]


def test_bins_of_the_time_line_hold_the_time_of_each_category():
    (lane,) = timeline(profile(iterations([4, 3])), num_bins=9).lanes
    # 9 bins of 1 ms: simulator 0-2 and 5-6.5.
    assert lane.shares["simulator"].tolist() == [1, 1, 0, 0, 0, 1, 0.5, 0, 0]
    assert lane.shares["python"].tolist() == [0, 0, 1, 1, 1, 0, 0.5, 1, 1]


def test_a_time_line_s_size_is_bounded(monkeypatch):
    monkeypatch.setattr("rayagi.profiler.timeline.MOST_SLICES", 5)
    (lane,) = timeline(profile(iterations([1, 2, 3, 4, 5, 6]))).lanes
    assert (len(lane.slices), lane.omitted) == (5, 7)
    assert {each.name for each in lane.slices} == {"iteration", "act"}
    assert min(each.end - each.start for each in lane.slices) == 5 * MS


def test_an_empty_profile_has_a_report():
    found = profile()
    assert "profile of" in report_text(found, breakdown(found), waits(found))
    assert "<canvas" in report_page(found, breakdown(found), [], timeline(found))


def test_the_difference_of_two_profiles_by_hand():
    rows = differences(breakdown(profile(iterations([4] * 5))), breakdown(profile(iterations([6] * 5))))
    by_key = {(row.operation, "+".join(row.categories)): row for row in rows}
    act = by_key["act", ""]
    assert (act.first_ns, act.second_ns, act.first_share, act.second_share) == (4 * MS, 6 * MS, 0.8, 6 / 7)
    assert by_key["act", "simulator"].second_ns == 3 * MS
    assert by_key["(outside operations)", ""].p_value == 1.0
    # 5 of 10 can be chosen in 252 ways, 2 of which differ as much; of 5 rows, Holm multiplies by 5 to 3.
    assert 2 / 252 * 3 * 0.8 < act.p_value < 2 / 252 * 5 * 1.2
    assert "2 ms" in difference_text(rows)


def test_the_difference_per_unit_of_work_by_hand():
    # Iterations of 4 + 1 ms do 2 units, those of 6 + 1 ms 4 units: 2 ms against 1.5 ms of act in each.
    first, second = (breakdown(profile(iterations([ms] * 5))) for ms in (4, 6))
    by_key = {
        (row.operation, "+".join(row.categories)): row for row in differences(first, second, (2.0, 4.0))
    }
    assert (by_key["act", ""].first_ns, by_key["act", ""].second_ns) == (2 * MS, 1.5 * MS)
    assert by_key["act", "simulator"].second_ns == 0.75 * MS
    outside = by_key["(outside operations)", ""]
    assert (outside.first_ns, outside.second_ns) == (0.5 * MS, 0.25 * MS)
    # Shares do not depend on units; 1 ms an iteration is the same time, but not per unit: significant.
    assert (outside.first_share, outside.second_share) == (1 / 5, 1 / 7)
    assert outside.p_value < 0.05
    text = difference_text(differences(first, second, (2.0, 4.0)), most=1, unit="1,000 environment steps")
    assert "Mean time per 1,000 environment steps." in text
    assert len(text.splitlines()) == 3


def test_profiles_without_iterations_are_compared_in_total():
    first, second = (profile(process([[(C.THREAD, 0, ms * MS, "m", 0)]])) for ms in (3, 4))
    (whole, python) = differences(breakdown(first), breakdown(second))
    assert (whole.first_ns, whole.second_ns, whole.p_value) == (3 * MS, 4 * MS, None)
    assert python.categories == {"python"}
    assert "No significance" in difference_text([whole])


def test_permutation_p_values_are_scipy_s():
    generator = np.random.default_rng(3)
    first, second = generator.normal(0, 1, (3, 12)), generator.normal([[0], [0.6], [2]], 1, (3, 15))
    expected = [
        stats.permutation_test(
            pair, lambda x, y, axis: x.mean(axis) - y.mean(axis), n_resamples=9999, rng=1
        ).pvalue
        for pair in zip(first, second, strict=True)
    ]
    assert permutation_p_values(first, second) == pytest.approx(expected, abs=0.02)


def test_holm_s_correction():
    # Sorted: 0.01 * 3, 0.02 * 2, 0.04 * 1 is no smaller than the one before it.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ns", "text"), [(0, "0 ns"), (999, "999 ns"), (1_500, "1.5 us"), (999_990, "1 ms"), (-2e9, "-2 s")]
)
def test_times_as_text(ns, text):
    assert seconds(ns) == text


def test_the_commands(tmp_path, capsys):
    first = write(tmp_path / "a", profile(iterations([4] * 4)))
    second = write(tmp_path / "b", profile(iterations([4] * 4), iterations([5] * 4, number=2)))
    assert main(["profile", "report", str(first)]) == 0
    assert "4 iterations" in capsys.readouterr().out
    assert "<canvas" in (first / "report.html").read_text()
    assert main(["profile", "report", str(second), "--html", str(tmp_path / "c.html")]) == 0
    assert "all processes" in capsys.readouterr().out
    assert (tmp_path / "c.html").exists()
    assert main(["profile", "diff", str(first), str(second)]) == 0
    assert "(outside operations)" in capsys.readouterr().out
    assert num_iterations(breakdown(profile(iterations([4] * 4))).rows) == 4


def test_what_is_no_profile_is_one_sentence(tmp_path, capsys):
    for command in (["report", str(tmp_path)], ["diff", str(tmp_path), str(tmp_path)]):
        assert main(["profile", *command]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"rayagi: {tmp_path} is not a profile")
        assert error.count("\n") == 1


def test_events_whose_thread_could_not_make_a_file_are_dropped_ones():
    found = profile(replace(iterations([4]), lost=30))
    assert "dropped 30 events: times and counts are incomplete" in report_text(found, breakdown(found), [])


def test_reports_of_very_long_names_are_bounded(tmp_path):
    long = 1_000_000 * "n"
    events = [(C.THREAD, 0, 10, "m", 0), (C.OPERATION, 1, 9, long, 1), (C.WAIT, 2, 3, long, 0)]
    written = replace(profile(process([events], name=long)), command=("python", long))
    found = read_profile(write(tmp_path / "p", written))
    rows, causes = breakdown(found), waits(found)
    assert max(map(len, report_text(found, rows, causes).splitlines())) < 700
    assert len(report_page(found, rows, causes, timeline(found))) < 100_000


def test_reports_of_very_many_operations_are_bounded():
    events = [(C.OPERATION, 10 * i, 10 * i + (3 if i else 9), f"step {i}", 1) for i in range(5000)]
    found = profile(process([[(C.THREAD, 0, 60_000, "m", 0), *events]]))
    rows = breakdown(found)
    text = report_text(found, rows, [])
    assert text.count("step ") == 199  # and what is outside of all
    assert "  and 4,801 more: 14.4 us" in text  # 4801 * 3 ns
    page = report_page(found, rows, [], timeline(found))
    assert page.count("<tr>") < 210
    assert "<p>and 4,801 more: 14.4 us</p>" in page


def test_the_memory_of_a_comparison_is_bounded():
    """One operation's name in each of many iterations: a table of both would have millions of entries."""
    rows = [
        Row(Cell("", "", number, f"step {number}"), frozenset({"python"}), number + 1)
        for number in range(600)
    ]
    found = Breakdown((), (), tuple(rows), {}, ())
    tracemalloc.start()
    compared = differences(found, found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000_000
    assert len(compared) == 1200
    assert {each.first_ns for each in compared} == {(number + 1) / 600 for number in range(600)}


def test_a_folder_in_place_of_a_file_is_one_sentence(tmp_path, capsys):
    found = write(tmp_path / "a", profile(iterations([4])))
    (found / "report.html").mkdir()
    for command in (["export", str(found), "."], ["export", str(found), "/"], ["report", str(found)]):
        assert main(["profile", *command]) == 2
        assert capsys.readouterr().err.count(" is a folder; name the ") == 1


def test_processes_that_recorded_nothing_are_counted_only():
    forked = process([[(C.THREAD, 5, 0, "main", 0)]], "idle three", pid=4)  # it replaced its program
    found = profile(iterations([4]), process([], "idle one", pid=2), process([], "idle two", pid=3), forked)
    rows = breakdown(found)
    for text in (report_text(found, rows, []), report_page(found, rows, [], timeline(found))):
        assert (
            "3 of 4 processes recorded nothing: killed before any event, or replaced by another program at once"
            in text
        )
        assert "gmi 1" in text
        assert "idle" not in text


def test_a_process_that_replaced_its_program_at_once_is_counted_only():
    def forked(ms):
        return process([[(C.THREAD, 1, ms * MS, "main", 0)]], f"after {ms} ms", pid=ms, is_replaced=True)

    found = profile(iterations([4]), forked(9), forked(11))
    text = report_text(found, breakdown(found), [])
    assert "1 of 3 processes recorded nothing" in text
    assert ("after 9 ms" in text, "after 11 ms" in text) == (False, True)


def test_where_iterations_were_chosen_the_report_says_which_were_not_reached():
    found = replace(profile(process([], "short", iterations=1)), skipped=3)
    text = report_text(found, breakdown(found), [])
    reason = "recording begins with iteration 4 of a process, and they made at most 1 iteration"
    assert f"1 of 1 process recorded nothing: {reason}" in text


def test_processes_that_could_not_write_who_they_are_are_counted(tmp_path, capsys):
    """On a full disk, or since they were killed at their start."""
    folder = write(tmp_path / "p", profile(iterations([4])))
    for name in ("host-42-9", "host-43-9"):
        (folder / name).mkdir()
    (folder / "host-42-9" / "names.jsonl").write_text("")
    found = read_profile(folder)
    assert main(["profile", "report", str(folder)]) == 0
    shown = capsys.readouterr().out, (folder / "report.html").read_text()
    summarize(folder)
    for text in (*shown, capsys.readouterr().out):
        assert "2 processes missing: the disk was full, or they died at their start" in text
    assert "missing" not in report_text(profile(iterations([4])), breakdown(found), [])
