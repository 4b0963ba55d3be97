"""``rayagi profile report``: prints a profile's tables, and writes its report as HTML."""

from __future__ import annotations

import argparse

from rayagi.cli.failures import UsageError
from rayagi.profiler.advice import advice
from rayagi.profiler.calibration import corrected
from rayagi.profiler.calibration_store import choose, default_folder, recorded_in
from rayagi.profiler.calibration_text import correction_text
from rayagi.profiler.critical_path import critical_path
from rayagi.profiler.extrapolation import extrapolate
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.summary import report_text, waits
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import printable, read_profile
from rayagi.run.atomic import replace_text


def run(arguments: argparse.Namespace) -> int:
    """Print the tables and write the page; returns the exit code.

    Raises:
        UsageError: the page is a folder.
        TraceError: the folder is no profile, or a file of it is damaged.
        ProfilerError: the calibration does not fit, or its file is damaged.
        DiskError: the page cannot be written.
    """
    path = arguments.html or arguments.profile / "report.html"
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the page to write with --html")
    profile = read_profile(arguments.profile)
    used, note, recorded = None, "", recorded_in(profile)
    if not arguments.raw:
        used, note = choose(recorded, arguments.calibration, default_folder())
    found = breakdown(profile) if used is None else corrected(profile, used.calibration)
    note, causes, critical = (
        note or correction_text(found, used, recorded),
        waits(profile),
        critical_path(profile),
    )
    sentences = advice(profile, found, causes, critical)
    run = extrapolate(found.merged, arguments.iterations or profile.iterations)
    print(report_text(profile, found, causes, note, critical, run, sentences))
    replace_text(path, report_page(profile, found, causes, timeline(profile), note, critical, run, sentences))
    print(f"\nreport: {printable(str(path))}")
    return 0
