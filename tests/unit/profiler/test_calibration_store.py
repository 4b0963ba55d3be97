"""Stored calibrations, runs of a program, and the commands that make and use them."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from rayagi.cli.main import main
from rayagi.cli.profile_validate import Validation, corrected_cpu_ns, validation_lines
from rayagi.profiler import calibration_store
from rayagi.profiler.calibration import Calibration
from rayagi.profiler.calibration_store import StoredCalibration, find, load, program_key, save, this_machine
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.interception import packages_with
from rayagi.profiler.program_runs import Mode, Run, RunError, rounds, setup_ns

STORED = StoredCalibration(
    Calibration({"call": 61.0, "annotation": 410.0}, spread=0.012), 2e8, "train.py", this_machine(), 3, 1.8e9
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_store, "folder", lambda: tmp_path / "calibrations")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["python", "train.py", "--seed", "3"], "/work/train.py"),
        (["/usr/bin/python3.11", "-u", "sub/../train.py"], "/work/train.py"),
        (["python", "/abs/train.py"], "/abs/train.py"),
        (["python3", "-m", "pkg.train", "--lr", "1"], "-m pkg.train"),
        (["/venv/bin/python", "/venv/bin/rayagi", "train", "Ant-v5"], "rayagi"),
        (["rayagi", "train", "HalfCheetah-v5"], "rayagi"),
        (["./train.py"], "/work/train.py"),
        (["python"], "python"),
        ([], ""),
    ],
)
def test_a_program_is_named_by_its_script_module_or_name(command, key):
    assert program_key(command, Path("/work")) == key


def test_a_calibration_is_found_again_by_its_program():
    path = save(STORED)
    assert find("train.py") == load(path) == STORED
    assert find("other.py") is None
    assert STORED.text == (
        "annotation 410 ns, call 61 ns, measured on 2027-01-15 by 3 rounds whose CPU times spread over 1.2%"
    )


def test_another_machine_has_none(monkeypatch):
    path = save(STORED)
    monkeypatch.setattr(calibration_store, "machine", lambda: "another processor")
    assert find("train.py") is None
    with pytest.raises(
        ProfilerError, match="is of another machine, Python or version of rayagi: calibrate here"
    ):
        load(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:40], "is no calibration"),
        (lambda text: text.replace("61.0", '"cheap"'), "could not convert"),
        (lambda text: text.replace("61.0", "-1.0"), "a cost outside 0 to 1e9 ns"),
        (lambda text: text.replace("61.0", "NaN"), "a cost outside"),
        (lambda text: text.replace('"hooks"', '"hook"'), "'hooks'"),
        (lambda _: "[]", "is no calibration"),
    ],
)
def test_damage_is_one_sentence(change, reason):
    path = save(STORED)
    path.write_text(change(path.read_text()))
    with pytest.raises(ProfilerError, match=reason) as raised:
        find("train.py")
    assert "rayagi profile calibrate" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_costs_of_hooks_and_of_the_set_up_by_hand():
    runs = [
        Run(Mode.PLAIN, 1000, 0, {}),
        Run(Mode.READY, 1100, 0, {}),
        Run(Mode.PLAIN, 1020, 0, {}),
        Run(Mode.READY, 1140, 0, {}),
    ]
    assert setup_ns(runs) == 1120 - 1010
    assert setup_ns([*runs[:1], Run(Mode.READY, 900, 0, {})]) == 0.0  # noise
    recorded = Run(Mode.ALL, 10**9, 0, {"call": 10**6, "annotation": 10**5})
    assert corrected_cpu_ns(recorded, STORED) == 10**9 - 61 * 10**6 - 410 * 10**5 - 2e8


def test_the_table_of_a_validation_has_errors_before_and_after():
    found = Validation(
        plain=(90.0, 110.0),
        instrumented=(120.0, 130.0),
        corrected=(95.0, 107.0),
        plain_wall=(50.0, 50.0),
        instrumented_wall=(60.0, 60.0),
        corrected_wall=(49.0, 50.0),
    )
    cpu, wall = ([cell.strip() for cell in line.split("  ") if cell] for line in validation_lines(found)[1:])
    assert cpu == ["CPU time", "100 ns +- 14.1%", "125 ns +- 5.7%", "+25.0 %", "101 ns +- 8.4%", "+1.0 %"]
    assert wall[3::2] == ["+20.0 %", "-1.0 %"]


PROGRAM = """
import math, os, sys, time
from rayagi import profiler
if len(sys.argv) > 1:
    sys.exit(sys.argv[1])
for _ in range(300):
    with profiler.iteration(), profiler.operation("learn"):
        for _ in range(40):
            math.sqrt(2.0)
if os.fork() == 0:  # outlives its parent
    if os.fork() == 0:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
    os._exit(0)
"""


VALIDATE = ["profile", "validate", "--rounds", "1", "--simulator", "math"]


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return [sys.executable, str(path)]


def test_a_round_counts_events_and_the_time_of_orphans(program):
    results = next(rounds(program, packages_with(["math"]), (*Mode,), 64))
    runs = {run.mode: run for run, _ in results}
    assert runs[Mode.PLAIN].counts == runs[Mode.READY].counts == {}
    assert runs[Mode.CALLS].counts.keys() == {"call"}
    assert runs[Mode.CALLS].counts["call"] >= 300 * 40
    # An iteration and an operation in each turn.
    assert runs[Mode.ALL].counts["annotation"] == 600
    assert all(run.cpu_ns > 3e8 for run in runs.values())
    assert all(profile is None for run, profile in results if run.mode in (Mode.PLAIN, Mode.READY))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no more data"], r"the program ended with 1 in mode plain; its last lines: .*no more data"),
        (None, "no-such-program cannot be run"),
    ],
)
def test_a_program_that_fails_is_explained(program, arguments, message):
    command = ["no-such-program"] if arguments is None else [*program, *arguments]
    with pytest.raises(RunError, match=message):
        next(rounds(command, packages_with([]), (Mode.PLAIN,), 64))


def test_a_program_without_native_calls_has_nothing_to_measure():
    with pytest.raises(RunError, match="called nothing that is intercepted"):
        next(rounds([sys.executable, "-c", "pass"], packages_with([]), (Mode.CALLS,), 64))


def test_calibrate_then_report_and_validate(program, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("rayagi.profiler.calibration.LARGEST_SPREAD", 10.0)  # not what is tested
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "validate", "--", *program]) == 2
    assert "was not calibrated here" in capsys.readouterr().err
    assert main(["profile", "calibrate", "--rounds", "2", "--simulator", "math", "--", *program]) == 0
    assert "round 2: CPU time plain " in capsys.readouterr().out
    stored = find(program_key(program, Path.cwd()))
    assert stored.costs.hooks.keys() == {"call", "annotation"}
    assert main(["profile", "--simulator", "math", "--out", "recorded", "--", *program]) == 0
    assert main(["profile", "report", "recorded"]) == 0
    assert f"is subtracted: {stored.text}" in capsys.readouterr().out
    assert "is subtracted" in Path("recorded/report.html").read_text()
    assert main(["profile", "report", "--uncorrected", "recorded"]) == 0
    assert "subtracted" not in capsys.readouterr().out
    assert main([*VALIDATE, "--json", "found.json", "--", *program]) == 0
    found = json.loads(Path("found.json").read_text())["validation"]
    assert len(found["plain"]) == len(found["corrected"]) == 1
    assert found["corrected"][0] <= found["instrumented"][0]
    assert "uninstrumented" in capsys.readouterr().out


def test_without_a_program_the_command_says_how(capsys):
    assert main(["profile", "calibrate"]) == 2
    assert "rayagi profile calibrate -- python train.py" in capsys.readouterr().err
