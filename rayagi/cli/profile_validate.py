"""``rayagi profile validate -- COMMAND``: measures how well the correction works for a program."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rayagi.cli.failures import UsageError
from rayagi.cli.output import complain, say
from rayagi.cli.profile_calibrate import runner
from rayagi.cli.sigterm import ended_by_sigterm
from rayagi.profiler.calibration_store import Recorded, choose, default_folder
from rayagi.profiler.calibration_text import calibration_line, validation_text
from rayagi.profiler.layout import HOOKS
from rayagi.profiler.machine import this_machine
from rayagi.profiler.measurement import validate
from rayagi.profiler.program import script_of


def run(arguments: argparse.Namespace) -> int:
    """Validate and print the comparison; returns the exit code.

    Raises:
        UsageError: no program, or no calibration that fits.
        CalibrationError: the program fails.
        ProfilerError: a simulator's module does not exist.
    """
    with ended_by_sigterm():
        program = runner(arguments)
        first = program(HOOKS)  # fills caches, and says of which Python the program is
        pythons, script = frozenset({first.python}), script_of(arguments.program)
        recorded = Recorded(arguments.program, this_machine(), pythons, script)
        used, reason = choose(recorded, None, default_folder())
        if used is None:
            raise UsageError(reason)
        report = complain if arguments.json else say
        found = validate(program, first, used.calibration, arguments.repetitions, report)
    if arguments.json:
        ratios = {name: getattr(found, name) for name in ("overhead", "error", "error_spread", "spread")}
        say(json.dumps({**asdict(found), **ratios, "calibration": asdict(used)}, indent=2))
    else:
        say("\n".join(["", *validation_text(found), calibration_line(used)]))
    return 0
