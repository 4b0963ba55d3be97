"""Runs of a program in turns: costs by hand, the loop that ends, and the CPU time of processes that nobody waits for."""

import json
import os
import sys
import textwrap
from dataclasses import replace

import pytest

from rayagi.profiler.calibration import PROCESS, Calibration, CalibrationError
from rayagi.profiler.layout import FROM_PYTHON, HOOKS, Category
from rayagi.profiler.measurement import calibrate, validate
from rayagi.profiler.program_runs import ProgramRunner, Run, rounds_of
from rayagi.profiler.schedule import SKIPPED_TURNS, Turns
from rayagi.profiler.trace import TraceError, read_profile
from tests.unit.profiler.traces import process, profile, write

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
    # All five: 8.6 %, more than 3 % times the root of 5 / 3; the last four: 10 %.
    found = calibrate(Program([1.0, 1.2, 1.0, 1.01, 0.99]))
    assert found.rounds == 3
    assert found.calibration.spread == pytest.approx(0.01)
    # Processes of those rounds: 5 ms in (1.0), -5 ms (1.01), 15 ms (0.99); standard error of these three.
    assert found.calibration.hooks[PROCESS] == pytest.approx(START_NS)
    assert found.calibration.errors[PROCESS] == pytest.approx(10e6 / 3**0.5)


def test_a_cost_that_no_hook_can_have_is_limited():
    """200 ms over 20,000 calls are 10 us each: noise of a machine, of which 1 us counts; the start has no limit."""

    def program(hooks):
        calls = 20_000 if hooks and "call" in hooks else 0
        start = START_NS if hooks is not None else 0
        return Run(
            PLAIN_NS + start + 10_000 * calls, counts={PROCESS: 1, "call": calls} if calls else {PROCESS: 1}
        )

    lines = []
    found = calibrate(program, report=lines.append)
    assert found.calibration.hooks == pytest.approx({PROCESS: START_NS, "call": 1_000})
    assert any("call: 10,000 ns measured, which is noise" in line for line in lines)


def test_more_rounds_may_spread_more():
    """Of 0.96 and 1.04 in turns, three spread over 4.7 %, six over 4.4 % (at most 4.2), seven over 4.3 % (at most 4.6)."""
    assert calibrate(Program([0.96, 1.04] * 4)).rounds == 7


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
            "dropped .* events?, so .* --limit-mb",
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


CYCLE = (frozenset(), frozenset({"call"}), frozenset({"annotation"}))


def test_every_other_turn_is_in_reverse_and_the_first_iterations_are_uninstrumented_or_not_counted():
    turns = Turns(CYCLE)
    order = [CYCLE.index(turns.hooks(number)) for number in range(SKIPPED_TURNS, SKIPPED_TURNS + 9)]
    assert order == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_iterations_are_added_up_to_rounds(tmp_path):
    """Two processes. One with turns 0 to 3 of two variants and half of turn 4; two rounds: turns 0, 2 and 1, 3."""
    both = frozenset({"call", "annotation"})
    #         turn, variant, start, end, CPU time
    blocks = [(0, 0, 0, 9, 1), (0, 1, 10, 19, 2), (1, 1, 20, 29, 4), (1, 0, 30, 39, 8)]
    blocks += [
        (2, 0, 40, 49, 16),
        (2, 1, 50, 59, 32),
        (3, 1, 60, 69, 64),
        (3, 0, 70, 79, 128),
        (4, 0, 80, 89, 256),
    ]
    main = [
        (Category.THREAD, 0, 100, "m", 0),
        (Category.OPERATION, 12, 30, "act", 1),  # an annotation counts where it begins: turn 0
        (Category.BACKEND, 8, 10, "add", 0),  # a call where it ends: turn 0
        (Category.BACKEND, 21, 29, "add", 0),  # turn 1
        (Category.BACKEND, 61, 62, "add", 0),  # turn 3
        (Category.BACKEND, 71, 72, "add", 0),  # uninstrumented: not counted, nor what follows
        (Category.WAIT, 51, 52, "peer", 0, FROM_PYTHON),
        (Category.BACKEND, 85, 95, "add", 0),
    ]
    one, other = process([main], pid=1), process([], pid=2)
    write(tmp_path / "p", profile(one, other))
    names = ("turn", "variant", "start_ns", "end_ns", "cpu_ns")
    lines = [json.dumps(dict(zip(names, each, strict=True))) + "\n" for each in blocks]
    (tmp_path / "p" / one.path.name / "blocks.jsonl").write_text("".join(lines) + '{"turn": ')
    found = rounds_of(read_profile(tmp_path / "p"), [frozenset(), both], 2)
    assert found == [
        {None: Run(1 + 16), both: Run(2 + 32, counts={"call": 1, "annotation": 1})},
        {None: Run(8 + 128), both: Run(4 + 64, counts={"call": 2, "annotation": 0})},
    ]
    with pytest.raises(CalibrationError, match="too few to take turns: fewer than 10 in each process"):
        rounds_of(read_profile(tmp_path / "p"), [frozenset(), both], 5)
    (tmp_path / "p" / one.path.name / "blocks.jsonl").write_text("[]\n")
    with pytest.raises(TraceError, match=r"blocks\.jsonl is damaged"):
        rounds_of(read_profile(tmp_path / "p"), [frozenset(), both], 2)


def test_iterations_of_a_program_take_turns():
    """20 iterations, two of them skipped, are six turns: two in each of three rounds. Each calls twice, in one operation."""
    code = """
    import _heapq
    from rayagi import profiler
    with profiler.phase("p"):
        for _ in range(20):
            with profiler.iteration(), profiler.operation("o"):
                _heapq.heapify([])
                _heapq.heapify([])
    """
    program = ProgramRunner(
        [sys.executable, "-c", textwrap.dedent(code)], {"_heapq": Category.SIMULATOR}, limit_mb=1
    )
    rounds = program.in_turns(CYCLE, 3)
    assert len(rounds) == 3
    for each in rounds:
        assert {variant: run.counts for variant, run in each.items()} == {
            None: {},
            frozenset({"call"}): {"call": 2 * 2},
            frozenset({"annotation"}): {"annotation": 2 * 2},
        }
        assert all(run.cpu_ns > 0 for run in each.values())


class Iterating(Program):
    """With iterations: each in_turns() gives as many rounds as are asked for, whose times are known."""

    turns = 0

    def __call__(self, hooks):
        return replace(super().__call__(hooks), iterations=50)

    def in_turns(self, variants, num_rounds):
        self.turns += 1
        return [{variant or None: self._block(variant) for variant in variants} for _ in range(num_rounds)]

    def _block(self, hooks):
        if not hooks:
            return Program.__call__(self, None)
        run = Program.__call__(self, hooks)
        counts = {kind: count for kind, count in run.counts.items() if kind != PROCESS}
        return Run(run.cpu_ns - START_NS, counts=counts)


def test_iterations_take_turns_where_there_are_enough():
    program = Iterating([1.0, 1.1, 1.2, 1.0])  # the first three rounds are not quiet
    found = calibrate(program)
    assert found.calibration.hooks == pytest.approx({"call": CALL_NS, "annotation": ANNOTATION_NS})
    assert program.turns == 2
    assert program.variants[0] == HOOKS
    assert PROCESS not in found.calibration.hooks
    checked = validate(program, program(HOOKS), found.calibration, repetitions=4)
    assert checked.in_turns
    assert len(checked.uninstrumented) == 4
    assert (checked.overhead, checked.error) == (pytest.approx(0.25), pytest.approx(0))


def test_scopes_that_begin_unrecorded_may_end_recorded():
    """A thread's operation is open while the hooks change: nothing raises, and later scopes are recorded."""
    code = """
    import threading
    from rayagi import profiler

    opened, close = threading.Event(), threading.Event()

    def other():
        with profiler.operation("outer"), profiler.operation("crosses"):
            opened.set()
            close.wait(60)
        with profiler.operation("after"):
            pass

    thread = threading.Thread(target=other)
    for number in range(14):
        with profiler.iteration():
            if number == 5:
                thread.start()
                opened.wait(60)
            if number == 6:
                close.set()
                thread.join()
    """
    program = ProgramRunner([sys.executable, "-c", textwrap.dedent(code)], {}, 1)
    assert len(program.in_turns([frozenset(), frozenset({"annotation"})], 3)) == 3
