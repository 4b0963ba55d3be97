"""``rayagi report``: rewrite a run's report.html and plots, and print its figures."""

from __future__ import annotations

import argparse

from rayagi.monitoring.report import summary_text, write_report
from rayagi.run.folder import open_run


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its figures; returns the exit code."""
    folder = open_run(arguments.run)
    print(summary_text(folder, write_report(folder)))
    return 0
