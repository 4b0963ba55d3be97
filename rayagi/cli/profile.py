"""``rayagi profile -- COMMAND``: runs a program and records it and its Python processes."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
from rayagi.profiler.injection import injected
from rayagi.profiler.interception import packages_with
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.session import create_profile
from rayagi.profiler.trace import read_profile


def run(arguments: argparse.Namespace) -> int:
    """Run the program; returns its exit code, or 128 and the number of the signal that ended it.

    Raises:
        UsageError: no program, or none of this name.
        ProfilerError: the folder cannot hold a profile; a simulator's module does not exist.
    """
    program: list[str] = arguments.program
    if not program:
        raise UsageError("give the program after two dashes: rayagi profile -- python train.py")
    packages = packages_with(arguments.simulator)
    folder = arguments.out or Path("profiles") / f"{_stem(program)}-{time.strftime('%Y%m%d-%H%M%S')}"
    schedule = None
    if arguments.iterations is not None:
        schedule = Schedule(skip=arguments.skip, record=arguments.iterations)
    folder = create_profile(folder, program, packages)
    environment = injected(os.environ, folder, packages, schedule, arguments.limit_mb)
    try:
        child = subprocess.Popen(program, env=environment)
    except OSError as error:
        raise UsageError(f"{program[0]} cannot be run: {error.strerror}") from error
    with _signals_passed_on(child):
        code = child.wait()
    _summarize(folder)
    return code if code >= 0 else 128 - code


def _stem(program: list[str]) -> str:
    """The script's name, or the program's."""
    scripts = [each for each in program if each.endswith(".py")]
    return Path(scripts[0] if scripts else program[0]).stem or "program"


@contextmanager
def _signals_passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM goes to the program. SIGINT reaches it from the terminal, and only the program decides what to do."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    previous = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _summarize(folder: Path) -> None:
    profile = read_profile(folder)
    threads = [thread for process in profile.processes for thread in process.threads]
    lost = sum(thread.dropped for thread in threads) + sum(each.lost for each in profile.processes)
    say(
        f"Profile {folder}: {sum(len(each.events) for each in threads):,} events of {len(threads)} threads in "
        f"{len(profile.processes)} processes" + (f"; {lost:,} dropped." if lost else ".")
    )
    if not profile.processes:
        say(
            "No Python process was recorded: python -I, -E and -S ignore PYTHONPATH, which brings the profiler in."
        )
