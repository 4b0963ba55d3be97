"""``rayagi profile -- COMMAND``: runs a program and records it and its Python processes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote
from types import FrameType

from placement.errors import counted
from rayagi.cli.failures import UsageError
from rayagi.cli.output import complain, say
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.injection import injected
from rayagi.profiler.interception import packages_with
from rayagi.profiler.layout import PROFILE
from rayagi.profiler.process_ends import ends_noted
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.session import create_profile
from rayagi.profiler.summary import iterations_not_reached, missing_processes, nothing_of_package
from rayagi.profiler.trace import TraceError, printable, read_profile
from rayagi.run.atomic import new_folder


def run(arguments: argparse.Namespace) -> int:
    """Run the program; returns its exit code, or 128 and the number of the signal that ended it.

    Raises:
        UsageError: no program, or none of this name; iterations to skip, but not how many to record.
        ProfilerError: the folder cannot hold a profile; a simulator's module does not exist.
    """
    program: list[str] = arguments.program
    if not program:
        raise UsageError("give the program after two dashes: rayagi profile -- python train.py")
    if arguments.skip and arguments.iterations is None:
        raise UsageError("--skip needs --iterations, the number to record after them")
    packages = packages_with(arguments.simulator, arguments.native)
    schedule = None
    if arguments.iterations is not None:
        # The last of those that are skipped warms up; without any it is the first one of all.
        schedule = Schedule(skip=max(0, arguments.skip - 1), warm_up=1, record=arguments.iterations)
    new = _missing_folders(arguments.out or Path("profiles"))
    folder = create_profile(arguments.out or _new_folder(program), program, packages, schedule)
    environment = injected(os.environ, folder, packages, schedule, arguments.limit_mb, gpu=arguments.gpu)
    try:
        with ends_noted(folder):
            code = _run_program(program, environment)
    except UsageError:
        (folder / PROFILE).unlink()
        for each in new if arguments.out else [folder, *new]:
            with suppress(OSError):  # another program has written into it
                each.rmdir()
        raise
    summarize(folder, [*arguments.simulator, *arguments.native])
    return code if code >= 0 else 128 - code


def _missing_folders(path: Path) -> list[Path]:
    """The folder and those around it that do not exist, the innermost first."""
    return [each for each in (path, *path.parents) if not each.exists()]


def _new_folder(program: list[str]) -> Path:
    """profiles/NAME-TIME; with a number for a program that is started twice in a second.

    Raises:
        ProfilerError: it cannot be made.
    """
    path = Path("profiles") / f"{_stem(program)[:100]}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        return new_folder(path)
    except OSError as error:
        raise ProfilerError(
            f"{path} cannot hold a profile: {error.strerror}; name a folder with --out"
        ) from error


def _stem(program: list[str]) -> str:
    """The script's name, the module's of python -m, or the program's."""
    scripts = [each for each in program if each.endswith(".py")]
    if not scripts and "-m" in program[:-1]:
        return os.path.basename(program[program.index("-m") + 1]) or "program"
    return Path(scripts[0] if scripts else program[0]).stem or "program"


_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def _run_program(program: list[str], environment: dict[str, str]) -> int:
    """Run it, and pass signals on; returns its exit code, or minus the number of the signal that ended it.

    Raises:
        UsageError: it cannot be run.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that arrive before the program has started

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and _is_in_foreground():
            return
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # What is ignored here, as under nohup, stays ignored in the program.
    previous = {number: signal.getsignal(number) for number in _PASSED_ON}
    previous = {n: handler for n, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in previous:
            signal.signal(number, pass_on)
        child = subprocess.Popen(program, env=environment)
        for arrived in early:
            child.send_signal(arrived)
        while True:
            # Not for ever: the handler of a signal that comes just before the wait runs only after it.
            with suppress(subprocess.TimeoutExpired):
                return child.wait(0.5)
    except OSError as error:
        raise UsageError(f"{program[0]} cannot be run: {error.strerror}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether a terminal's Ctrl-C reaches this process: then it reaches the program, too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


_NOTHING = (
    "No Python process was recorded. Perhaps the program starts none, or one before Python 3.11, or with -I, -E or -S: they "
    "ignore PYTHONPATH, which brings the profiler in."
)


def summarize(folder: Path, named: Sequence[str] = ()) -> None:
    """Say what was recorded. If it cannot be read, say why: the exit code is the program's all the same.

    Args:
        folder: of the profile
        named: packages that the user wants to see
    """
    try:
        profile = read_profile(folder)
    except TraceError as error:
        complain(f"rayagi profile: {error}")
        return
    threads = [thread for process in profile.processes for thread in process.threads]
    lost = sum(thread.dropped for thread in threads) + sum(each.lost for each in profile.processes)
    say(
        f"Profile {printable(str(folder))}: {counted(sum(each.num_events for each in threads), 'event')} of "
        f"{counted(len(threads), 'thread')} in {counted(len(profile.processes), 'process', 'processes')}"
        + (f"; {lost:,} dropped." if lost else ".")
    )
    for each in named:
        if note := nothing_of_package(profile, each):
            complain(f"rayagi profile: {note}")
    if missing := missing_processes(profile):
        say(f"{missing}.")
    if profile.processes and not threads and profile.skipped is not None:
        say(f"No iteration was recorded: {iterations_not_reached(profile.processes, profile.skipped)}.")
    elif profile.processes:
        say(f"Next:\n  rayagi profile report {printable(quote(str(folder)))}")
    elif not profile.undescribed:
        say(_NOTHING)
