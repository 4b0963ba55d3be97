"""``rayagi profile calibrate -- COMMAND``: measures what recording an event costs in a program."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
from rayagi.profiler import gpu_calls
from rayagi.profiler.calibration_store import default_folder, save, stored
from rayagi.profiler.calibration_text import costs_text
from rayagi.profiler.interception import packages_with
from rayagi.profiler.measurement import calibrate
from rayagi.profiler.program_runs import ProgramRunner


def runner(arguments: argparse.Namespace) -> ProgramRunner:
    """Runs the program of the command line.

    Raises:
        UsageError: there is none.
        ProfilerError: a simulator's module does not exist.
    """
    if not arguments.program:
        name = arguments.command
        raise UsageError(f"give the program after two dashes: rayagi {name} -- python train.py --steps 20000")
    packages = packages_with(arguments.simulator, arguments.native)
    return ProgramRunner(arguments.program, packages, arguments.limit_mb)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within it SIGTERM is an exception, so that the program is ended too, and its traces are deleted."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate and store it; returns the exit code.

    Raises:
        UsageError: no program.
        CalibrationError: the program fails or records nothing, its CPU time spreads too much, or ``--gpu`` finds no GPU.
        ProfilerError: a simulator's module does not exist; the folder of calibrations cannot be written.
    """
    with ended_by_sigterm():
        program = runner(arguments)
        functions = gpu_calls.function_costs(gpu_calls.measured()) if arguments.gpu else {}
        measured = calibrate(program, arguments.rounds, say)
    calibration = replace(measured.calibration, functions=functions)
    found = stored(replace(measured, calibration=calibration), arguments.program)
    path = save(found, default_folder())
    say("\n".join(["", *costs_text(found), "", f"calibration: {path}"]))
    return 0
