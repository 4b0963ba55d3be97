"""From recorded iterations to a run, with values worked out by hand."""

import json

import pytest

from rayagi.profiler.extrapolation import extrapolate
from rayagi.profiler.layout import Category as C
from rayagi.profiler.overlap import NO_ITERATION, Cell, Row, breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.session import create_profile, note_iterations
from rayagi.profiler.summary import report_text
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import read_profile
from tests.unit.profiler.traces import process, profile

PYTHON = frozenset(["python"])


def row(iteration, operation, ns, categories=PYTHON):
    return Row(Cell("", "", iteration, operation), categories, ns)


def test_a_run_is_the_mean_of_the_recorded_iterations_as_often_as_it_has_some():
    """learn: 8, 10, 12 and once 10 of two sets: mean 10, s = sqrt(8 / 3) = 1.633. t(0.975, 3) = 3.182.

    3.182 * 1.633 * sqrt(100 * 96 / 4) = 254.6.
    """
    rows = [row(i, "learn", ns) for i, ns in enumerate((8, 10, 12, 4))]
    rows += [row(3, "learn", 6, frozenset(["backend"])), row(2, "save", 4), row(NO_ITERATION, "start", 99)]
    found = extrapolate(rows, 100)
    learn, save = found.operations
    assert (found.recorded, found.iterations) == (4, 100)
    assert (learn.operation, learn.iteration_ns, learn.run_ns) == ("learn", 10, 1000)
    assert learn.error_ns == pytest.approx(254.6, abs=0.05)
    # save: 4 in one of 4: mean 1, s = 2, the same factor: 3.182 * 2 * 48.99.
    assert (save.iteration_ns, save.run_ns, save.error_ns) == (1, 100, pytest.approx(311.8, abs=0.05))


def test_one_recorded_iteration_has_no_interval_and_equal_ones_no_error():
    assert extrapolate([row(5, "learn", 7)], 3).operations[0].error_ns is None
    assert extrapolate([row(5, "learn", 7), row(6, "learn", 7)], 3).operations[0].error_ns == 0


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_nothing_is_extrapolated_to_no_more_than_was_recorded(iterations):
    rows = [row(0, "learn", 1), row(1, "learn", 1)]
    assert extrapolate(rows, iterations) is None
    assert extrapolate([row(NO_ITERATION, "learn", 1)], 9) is None


def test_the_report_has_the_run():
    events = [
        (C.ITERATION, 0, 10, "iteration", 0, 0),
        (C.OPERATION, 0, 10, "learn", 1),
        (C.ITERATION, 10, 20, "iteration", 0, 1),
        (C.OPERATION, 10, 20, "learn", 1),
    ]
    found = profile(process([events]))
    rows = breakdown(found)
    run = extrapolate(rows.merged, 50)
    lines = [" ".join(line.split()) for line in report_text(found, rows, [], run=run).splitlines()]
    at = lines.index("the run's 50 iterations, as estimated from 2 recorded iterations")
    assert lines[at + 1 : at + 3] == [
        "operation per iteration in the run 95 % within",
        "learn 10 ns 500 ns +-0 ns",
    ]
    page = report_page(found, rows, [], timeline(found), run=run)
    assert "<h2>Whole run</h2><p>the run's 50 iterations" in page


def test_a_profile_knows_the_iterations_that_somebody_else_counted(tmp_path):
    folder = create_profile(tmp_path / "profile", ["x"], {})
    assert read_profile(folder).iterations == 0
    note_iterations(folder, 70)
    assert read_profile(folder).iterations == 70
    assert json.loads((folder / "profile.json").read_text())["command"] == ["x"]
