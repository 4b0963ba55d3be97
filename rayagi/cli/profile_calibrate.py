"""``rayagi profile calibrate -- COMMAND``: measures what recording an event costs in a program."""

from __future__ import annotations

import argparse

from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
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
    return ProgramRunner(arguments.program, packages_with(arguments.simulator), arguments.limit_mb)


def run(arguments: argparse.Namespace) -> int:
    """Calibrate and store it; returns the exit code.

    Raises:
        UsageError: no program.
        CalibrationError: the program fails or records nothing, or its CPU time spreads too much.
        ProfilerError: a simulator's module does not exist; the folder of calibrations cannot be written.
    """
    measured = calibrate(runner(arguments), arguments.rounds, say)
    found = stored(measured, arguments.program)
    path = save(found, default_folder())
    say("\n".join(["", *costs_text(found), "", f"calibration: {path}"]))
    return 0
