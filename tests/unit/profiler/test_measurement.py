"""Runs of a program in turns: costs by hand, the loop that ends, and the CPU time of processes that nobody waits for."""

import os
import sys
import textwrap

import pytest

from rayagi.profiler.calibration import PROCESS, Calibration, CalibrationError
from rayagi.profiler.layout import HOOKS, Category
from rayagi.profiler.measurement import calibrate, validate
from rayagi.profiler.program_runs import ProgramRunner, Run

CALL_NS, ANNOTATION_NS, START_NS, PLAIN_NS = 200, 1000, 5_000_000, 1_000_000_000
COUNTS = {"call": 1_000_000, "annotation": 50_000, "activity": 3}


class Program:
    """A program whose times are known: each uninstrumented run takes the next factor times PLAIN_NS."""

    def __init__(self, factors=(1.0,), counts=COUNTS):
        self.factors, self.counts, self.variants = list(factors), counts, []

    def __call__(self, hooks):
        self.variants.append(hooks)
        if hooks is None:
            factor = self.factors[0] if len(self.factors) == 1 else self.factors.pop(0)
            return Run(round(factor * PLAIN_NS))
        counts = {kind: count for kind, count in self.counts.items() if kind in hooks}
        costs = CALL_NS * counts.get("call", 0) + ANNOTATION_NS * counts.get("annotation", 0)
        return Run(PLAIN_NS + START_NS + costs, counts={PROCESS: 1, **counts}, python="3.11.7")


def test_costs_are_the_increase_by_the_number_of_events():
    lines = []
    program = Program()
    found = calibrate(program, report=lines.append)
    assert found.calibration.hooks == pytest.approx(
        {PROCESS: START_NS, "call": CALL_NS, "annotation": ANNOTATION_NS}
    )
    assert found.calibration.errors == pytest.approx({PROCESS: 0, "call": 0, "annotation": 0})
    assert (found.counts, found.rounds, found.python) == ({PROCESS: 1, **COUNTS}, 3, "3.11.7")
    # A run with all hooks, then three rounds, the second in reverse. Three activities cannot matter: they get no run.
    once = [None, frozenset(), frozenset({"call"}), frozenset({"annotation"})]
    assert program.variants == [HOOKS, *once, *once[::-1], *once]
    assert "too few events to cost anything: activity" in lines


def test_rounds_go_on_until_three_in_a_row_are_quiet():
    # Standard deviations by mean of the uninstrumented runs: 1.0 1.2 1.0: 10.8 %; 1.2 1.0 1.01: 10.5 %; 1.0 1.01 0.99: 1 %.
    found = calibrate(Program([1.0, 1.2, 1.0, 1.01, 0.99]))
    assert found.rounds == 3
    assert found.calibration.spread == pytest.approx(0.01)
    # Processes of those rounds: 5 ms in (1.0), -5 ms (1.01), 15 ms (0.99); standard error of these three.
    assert found.calibration.hooks[PROCESS] == pytest.approx(START_NS)
    assert found.calibration.errors[PROCESS] == pytest.approx(10e6 / 3**0.5)


def test_rounds_end_although_no_three_are_quiet():
    program = Program([1.0, 1.2] * 10)
    with pytest.raises(CalibrationError, match=r"spread over 10\.\d % in 4 rounds, .* calibrate again"):
        calibrate(program, most_rounds=4)
    assert program.variants.count(None) == 4


def test_a_program_without_events_has_no_costs():
    with pytest.raises(CalibrationError, match="recorded no events, so there is nothing to calibrate"):
        calibrate(Program(counts={}))


def test_a_validation_by_hand():
    """Costs that are known only half: 200 ms of calls, 50 of annotations, 5 of the start remain half in 1255 ms."""
    half = Calibration({"call": CALL_NS / 2, "annotation": ANNOTATION_NS / 2, PROCESS: START_NS / 2})
    program = Program([1.0, 1.02])
    found = validate(program, program(HOOKS), half, repetitions=2)
    assert not found.in_turns
    assert found.uninstrumented == (1_000_000_000, 1_020_000_000)
    assert found.instrumented == (1_255_000_000, 1_255_000_000)
    assert found.corrected == (1_127_500_000, 1_127_500_000)
    assert found.counts == {PROCESS: 2, "activity": 6, "annotation": 100_000, "call": 2_000_000}
    assert found.overhead == pytest.approx(1255 / 1010 - 1)
    assert found.error == pytest.approx(1127.5 / 1010 - 1)
    # Two values spread by their difference divided by the root of 2.
    assert found.error_spread == pytest.approx((1127.5 / 1000 - 1127.5 / 1020) / 2**0.5)
    assert found.spread == pytest.approx(20 / 2**0.5 / 1010)
    with pytest.raises(CalibrationError, match="at least 2 repetitions, not 1"):
        validate(program, Run(1), half, repetitions=1)


def runner(code, **kwargs):
    return ProgramRunner([sys.executable, "-c", textwrap.dedent(code)], {}, kwargs.get("limit_mb", 1))


BURN = "import time\ndef burn(s):\n    while time.process_time() < s: pass\n"


@pytest.mark.parametrize(
    ("program", "least_s"),
    [
        ("burn(0.3)", 0.3),
        ("import subprocess, sys\nsubprocess.run([sys.executable, '-c', burn_code + 'burn(0.3)'])", 0.3),
        # An orphan: its parent ends first, and does not wait for it.
        ("import os\nif os.fork() == 0:\n    burn(0.3)\n    os._exit(0)", 0.3),
        # Children of a process that ignores SIGCHLD are in no sum of the kernel's; read every 0.1 s.
        (
            "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nif os.fork() == 0:\n    burn(0.6)\n"
            "    os._exit(0)\ntry: os.wait()\nexcept ChildProcessError: pass",
            0.4,
        ),
    ],
)
def test_the_cpu_time_of_all_processes_counts(program, least_s):
    run = runner(f"{BURN}\nburn_code = {BURN!r}\n{program}")(None)
    assert least_s * 1e9 <= run.cpu_ns < 30e9
    assert run.counts == {}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('starts'); raise SystemExit('no such task')", "exit code 1, .* no such task"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9, .* no output"),
        (
            "from rayagi import profiler\nfor i in range(100_000):\n    with profiler.operation('a'): pass",
            "events were dropped.* --limit-mb",
        ),
    ],
)
def test_a_program_that_fails_or_records_too_much_is_refused(code, message):
    with pytest.raises(CalibrationError, match=message):
        runner(code)(HOOKS)
    with pytest.raises(CalibrationError, match="no-such-program cannot be run: No such file"):
        ProgramRunner(["no-such-program"], {}, 1)(None)


@pytest.mark.parametrize(
    ("hooks", "counts"),
    [
        (HOOKS, {PROCESS: 1, "call": 2, "annotation": 3, "activity": 1}),
        (frozenset(), {PROCESS: 1}),
        (frozenset({"call"}), {PROCESS: 1, "call": 2}),
        (frozenset({"annotation"}), {PROCESS: 1, "annotation": 3}),
        (frozenset({"activity"}), {PROCESS: 1, "activity": 1}),
    ],
)
def test_each_kind_of_hook_can_be_recorded_alone(hooks, counts):
    """Of a program with three annotations, an activity, and two calls of a module that counts as a simulator's."""
    code = """
    import _heapq
    from rayagi import profiler
    with profiler.phase("p"), profiler.iteration(), profiler.operation("o"):
        with profiler.activity(profiler.Category.WAIT, "peer"):
            pass
        _heapq.heapify([])
    _heapq.heapify([])
    """
    program = [sys.executable, "-c", textwrap.dedent(code)]
    found = ProgramRunner(program, {"_heapq": Category.SIMULATOR}, 1)(hooks)
    assert found.counts == counts
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert "RAYAGI_PROFILE" not in os.environ
