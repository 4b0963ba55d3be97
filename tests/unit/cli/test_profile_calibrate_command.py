"""`rayagi profile calibrate` and `validate`, and the report that uses what they store."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.files import cache_folder
from rayagi.cli import main
from rayagi.profiler import gpu_calls, measurement
from rayagi.profiler.calibration_store import load
from tests.waiting import until

PROGRAM = """
from rayagi import profiler

for _ in range(400):
    with profiler.operation("learn"):
        pass
"""
CALIBRATION_FILES = "cache/rayagi/calibrations/*.json"


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the folder
    # Calibrations of its own, but the recorder that is compiled already.
    (tmp_path / "cache" / "rayagi").mkdir(parents=True)
    (tmp_path / "cache" / "rayagi" / "kernels").symlink_to(cache_folder("kernels"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)


@pytest.fixture
def any_spread(monkeypatch):
    """A program of a tenth of a second spreads more than one that is worth a calibration."""
    for module in ("measurement", "calibration"):
        monkeypatch.setattr(f"rayagi.profiler.{module}.LARGEST_SPREAD", 1.0)
    monkeypatch.setattr(measurement, "FEWEST_ROUNDS", 2)


def test_from_calibration_to_a_corrected_report(any_spread, tmp_path, capsys):
    command = ["--", sys.executable, "program.py"]
    assert main(["profile", "--out", "p", *command]) == 0
    assert main(["profile", "report", "p"]) == 0
    assert (
        f"Times include the profiler's own: no calibration of program is stored. Run: rayagi profile calibrate -- "
        f"{sys.executable} program.py"
    ) in capsys.readouterr().out

    assert main(["profile", "calibrate", *command]) == 0
    out = capsys.readouterr().out
    assert "400 annotation" in out
    assert "start of a process" in out
    (path,) = tmp_path.glob(CALIBRATION_FILES)
    found = load(path)
    assert set(found.calibration.hooks) == {"process", "annotation"}
    assert found.counts == {"process": 1, "annotation": 400}
    assert min(found.calibration.hooks.values()) >= 0

    # A cost that is known: 400 annotations of 100 ns are removed.
    content = json.loads(path.read_text())
    content["calibration"]["hooks"]["annotation"] = 100.0
    path.write_text(json.dumps(content))
    assert main(["profile", "report", "p"]) == 0
    assert "Without the profiler's own time: 40 us (" in capsys.readouterr().out
    assert "Without the profiler" in (tmp_path / "p" / "report.html").read_text()
    assert main(["profile", "report", "p", "--raw"]) == 0
    assert "Times include the profiler's own.\n" in capsys.readouterr().out

    assert main(["profile", "validate", "--repetitions", "2", "--json", *command]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"process": 2, "annotation": 800, "activity": 0, "call": 0}
    start = content["calibration"]["hooks"]["process"]
    assert found["corrected"] == pytest.approx([each - start - 400 * 100 for each in found["instrumented"]])
    assert found["calibration"]["command"] == [sys.executable, "program.py"]


def test_costs_of_calls_of_cuda_are_stored_and_removed(any_spread, tmp_path, capsys, monkeypatch):
    """The loop of calls needs a GPU; what becomes of its times does not."""
    once = {"cudaLaunchKernel": gpu_calls.CallTimes(10, 1_000, 31_000)}
    monkeypatch.setattr(gpu_calls, "measured", lambda: [once])
    command = ["--", sys.executable, "program.py"]
    assert main(["profile", "calibrate", "--gpu", *command]) == 0
    assert re.search(r"cudaLaunchKernel, within it +3(\.0+)? us ", capsys.readouterr().out)
    (path,) = tmp_path.glob(CALIBRATION_FILES)
    assert load(path).calibration.functions == {"cudaLaunchKernel": 3_000}


@pytest.mark.slow
def test_a_calibration_of_another_machine_is_refused(any_spread, tmp_path, capsys):
    command = ["--", sys.executable, "program.py"]
    assert main(["profile", "--out", "p", *command]) == 0
    assert main(["profile", "calibrate", *command]) == 0
    (path,) = tmp_path.glob(CALIBRATION_FILES)
    content = json.loads(path.read_text())
    content["machine"] = {"cpu": "Abacus", "cores": 1}
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["profile", "report", "p"]) == 0
    assert "is of another machine (1-core Abacus) than the profile" in capsys.readouterr().out
    for arguments in (["report", "p", "--calibration", str(path)], ["validate", *command]):
        assert main(["profile", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is of another machine (1-core Abacus)" in line


@pytest.mark.parametrize("command", ["calibrate", "validate"])
@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        ([], 2, "give the program after two dashes: rayagi profile "),
        (["--"], 2, "give the program after two dashes"),
        (["--", "no-such-program-here"], 1, "no-such-program-here cannot be run: No such file"),
        (["--", sys.executable, "-c", "raise SystemExit('broken')"], 1, "exit code 1, .*: broken"),
        (["--simulator", "no_such_module", "--", "true"], 2, "there is no module 'no_such_module'"),
    ],
)
def test_bad_input_is_one_sentence(command, program, code, message, capsys):
    assert main(["profile", command, *program]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_program_that_records_nothing_is_said(capsys):
    assert main(["profile", "calibrate", "--", sys.executable, "-c", "pass"]) == 1
    assert "recorded no events, so there is nothing to calibrate" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_program_ends_with_the_calibration(number, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = "import os, time; print(os.getpid(), file=open('pid', 'w'), flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "rayagi", "profile", "calibrate", "--", sys.executable, "-c", code]
    calibration = subprocess.Popen(command)
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip()))
    calibration.send_signal(number)
    assert calibration.wait(60) == (130 if number == signal.SIGTERM else -number)
    until(lambda: not Path(f"/proc/{pid}").exists())
    if number == signal.SIGTERM:
        assert not list(tmp_path.glob("rayagi-profile-*"))
