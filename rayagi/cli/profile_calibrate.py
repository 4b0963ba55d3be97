"""``rayagi profile calibrate -- COMMAND``: measures what recording an event costs in a program."""

from __future__ import annotations

import argparse
from dataclasses import replace

from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
from rayagi.cli.sigterm import ended_by_sigterm
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
