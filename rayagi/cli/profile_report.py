"""``rayagi profile report``: prints a profile's tables, and writes its report as HTML."""

from __future__ import annotations

import argparse

from rayagi.cli.failures import UsageError
from rayagi.profiler.advice import advice
from rayagi.profiler.calibration import corrected
from rayagi.profiler.calibration_store import find, program_key
from rayagi.profiler.critical_path import critical_path
from rayagi.profiler.overlap import Breakdown, breakdown
from rayagi.profiler.page import report_page
from rayagi.profiler.summary import report_text, waits
from rayagi.profiler.timeline import timeline
from rayagi.profiler.trace import Profile, read_profile
from rayagi.run.atomic import replace_text


def run(arguments: argparse.Namespace) -> int:
    """Print the tables and write the page; returns the exit code.

    Raises:
        UsageError: the page is a folder.
        TraceError: the folder is no profile, or a file of it is damaged.
        DiskError: the page cannot be written.
    """
    path = arguments.html or arguments.profile / "report.html"
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the page to write with --html")
    profile = read_profile(arguments.profile)
    found, note = _without_cost(profile) if not arguments.uncorrected else (breakdown(profile), "")
    causes, critical = waits(profile), critical_path(profile)
    sentences = advice(found, causes, critical)
    print(report_text(profile, found, causes, critical, sentences))
    if note:
        print(f"\n{note}")
    replace_text(path, report_page(profile, found, causes, timeline(profile), critical, sentences, note))
    print(f"\nreport: {path}")
    return 0


def _without_cost(profile: Profile) -> tuple[Breakdown, str]:
    """The breakdown, corrected if this program was calibrated on this machine; and what was done, as a sentence."""
    stored = find(program_key(profile.command, profile.folder))
    found = breakdown(profile)
    if stored is None:
        return found, (
            "The profiler's own cost is in these times: this program was not calibrated on this machine. "
            "`rayagi profile calibrate -- COMMAND` does it."
        )
    less = corrected(profile, stored.costs)
    before, after = (sum(each.totals.get("", {}).values()) for each in (found, less))
    share = (before - after) / before if before else 0.0
    return less, f"The profiler's own cost, {share:.1%} of the time, is subtracted: {stored.text}."
