"""Tests pass in the background and under nohup, where SIGINT, SIGQUIT and SIGHUP are ignored from the start."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
AS_NOHUP_AND_A_SCRIPT_DO = 'nohup "$@" & wait $!'
"""For sh: without job control it ignores SIGINT and SIGQUIT for what it starts with ``&``."""


def in_background(*command, **options):
    return subprocess.run(
        ["/bin/sh", "-c", AS_NOHUP_AND_A_SCRIPT_DO, "sh", *command],
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        **options,
    )


def test_the_background_of_these_tests_ignores_what_a_terminal_sends():
    ask = "import signal; print(*(int(signal.getsignal(n) is signal.SIG_IGN) for n in (2, 3, 1, 15)))"
    assert in_background(sys.executable, "-c", ask).stdout == "1 1 1 0\n"


@pytest.mark.slow
def test_tests_that_send_signals_pass_in_the_background():
    chosen = [
        "tests/unit/run/test_interrupt.py",
        "tests/unit/run/test_train_command.py::test_a_pipe_whose_reader_left_loses_nothing[2]",
        "tests/unit/collectives/test_shm_kernel.py::test_an_interrupted_call_ends_at_once_and_for_all",
    ]
    done = in_background(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", *chosen, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"\d+ passed", done.stdout)


def test_each_test_file_that_sends_such_a_signal_sets_its_disposition():
    missing = [
        str(path.relative_to(ROOT))
        for path in TESTS.rglob("test_*.py")
        if re.search(r"\bsignal\.SIG(INT|QUIT|HUP)\b", text := path.read_text())
        and "default_signals" not in text
    ]
    assert missing == [], 'these need pytest.mark.usefixtures("default_signals")'
