"""``rayagi profile calibrate``: measures what the profiler costs a program."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rayagi.cli.failures import UsageError
from rayagi.cli.output import say
from rayagi.profiler.calibration import CalibrationError, delta_calibration
from rayagi.profiler.calibration_store import StoredCalibration, program_key, save, this_machine
from rayagi.profiler.interception import packages_with
from rayagi.profiler.program_runs import Mode, Run, rounds, setup_ns
from rayagi.profiler.summary import seconds

_MOST = 4
"""Times as many rounds as asked for, at most, while uninstrumented runs spread too much."""


def run(arguments: argparse.Namespace) -> int:
    """Measure the costs, and keep them for reports; returns the exit code.

    Raises:
        UsageError: no program.
        ProfilerError: it cannot be run, fails, or records nothing; runs spread too much; the result cannot be written.
    """
    program = program_of(arguments, "calibrate")
    runs: list[Run] = []
    modes = (Mode.PLAIN, Mode.READY, Mode.CALLS, Mode.ALL)
    done = 0
    for results in rounds(program, packages_with(arguments.simulator), modes, arguments.limit_mb):
        runs += [run for run, _ in results]
        done += 1
        say(f"round {done}: CPU time " + by_mode([run for run, _ in results]))
        if done < arguments.rounds:
            continue
        try:
            costs = delta_calibration([run.block for run in runs if run.mode is not Mode.PLAIN])
        except CalibrationError:
            if done == _MOST * arguments.rounds:
                raise
            continue
        break
    stored = StoredCalibration(
        costs, setup_ns(runs), program_key(program, Path.cwd()), this_machine(), done, time.time()
    )
    path = save(stored)
    say(
        f"{stored.text}; {seconds(stored.setup_ns)} of CPU time for each run.\nReports of this program use it: {path}"
    )
    return 0


def by_mode(runs: Sequence[Run]) -> str:
    """CPU times of a round."""
    order = list(Mode)
    ordered = sorted(runs, key=lambda run: order.index(run.mode))
    return ", ".join(f"{run.mode} {seconds(run.cpu_ns)}" for run in ordered)


def program_of(arguments: argparse.Namespace, command: str) -> list[str]:
    """What is after the dashes.

    Raises:
        UsageError: nothing is.
    """
    program: list[str] = arguments.program
    if not program:
        raise UsageError(f"give the program after two dashes: rayagi profile {command} -- python train.py")
    return program
