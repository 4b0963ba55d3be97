"""End of a command's process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import until

BEGIN = """
import atexit, ctypes
# A native library whose end waits for ever.
libc = ctypes.CDLL(None)
assert libc.__cxa_atexit(libc.pause, None, None) == 0
atexit.register(print, "end of Python")
"""


def run_python(code, *arguments, stdout=subprocess.PIPE):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=buffered,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(("envs",), 0, "HalfCheetah-v5", marks=pytest.mark.slow),
        (("report", "nowhere"), 2, "nowhere"),
    ],
)
def test_a_native_library_that_does_not_end_keeps_no_command_from_ending(arguments, code, message):
    done = run_python(f"{BEGIN}\nfrom rayagi.cli import run_process\nrun_process()", *arguments)
    assert done.returncode == code
    assert message in done.stdout + done.stderr
    assert done.stdout.endswith("end of Python\n")


LEFT = """import multiprocessing, signal, time
import rayagi.cli, sys


def stay(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(1000)


def command():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    for target, given in ((time.sleep, (1000,)), (stay, (ready,))):
        context.Process(target=target, args=given).start()
    ready.wait()
    return 3


sys.modules["rayagi.cli.main"].main = command
rayagi.cli.run_process()"""


def test_processes_that_an_environment_has_left_keep_no_command_from_ending():
    """They are not daemons, and one ignores SIGTERM."""
    assert run_python(LEFT).returncode == 3


STARTS = """import subprocess
import rayagi.cli, sys


def command():
    print(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid, sys.argv[1])
    return 0


sys.modules["rayagi.cli.main"].main = command
rayagi.cli.run_process()"""


def test_a_subprocess_that_an_environment_has_left_is_killed_and_one_of_the_shell_before_is_not():
    """As of `rayagi train > >(tee log)`, which has not written all yet."""
    shell = f'exec 3< <(exec sleep 1000); exec {shlex.quote(sys.executable)} -c "$0" "$!"'
    done = subprocess.run(
        ["bash", "-c", shell, STARTS], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    started, of_shell = map(int, done.stdout.split())
    try:
        os.kill(of_shell, signal.SIGKILL)  # raises if there is none
        until(lambda: has_ended(started))
    finally:
        with suppress(ProcessLookupError):
            os.kill(started, signal.SIGKILL)


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_the_exit_code_is_the_same_without_a_reader():
    with open("/dev/full", "w") as full:
        code = "from rayagi.cli import run_process\nprint('not written yet')\nrun_process()"
        done = run_python(code, "train", "Nothing-v0", stdout=full)
    assert done.returncode == 2
    assert "Nothing-v0" in done.stderr


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [
        (">&-", "envs", 0),
        pytest.param("2>&-", "report nowhere", 2, marks=pytest.mark.slow),
        ("<&- >&- 2>&-", "report nowhere", 2),
    ],
)
def test_closed_standard_streams_change_no_exit_code(closed, arguments, code):
    command = f"{shlex.quote(sys.executable)} -m rayagi {arguments} {closed}"
    assert subprocess.run(["sh", "-c", command], timeout=120, check=False).returncode == code


def test_names_that_the_output_s_encoding_does_not_have_are_printed_nevertheless():
    code = """import sys, rayagi.cli
sys.modules["rayagi.cli.main"].main = lambda: print("\\xfc \\udcff") or 0
rayagi.cli.run_process()"""
    command = [sys.executable, "-c", code]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=ascii_only, capture_output=True, timeout=60, check=True)
    assert done.stdout == b"\\xfc \\udcff\n"
