"""``rayagi report``: a run's report.html and plots, anew, and its numbers."""

from __future__ import annotations

import argparse

from rayagi.monitoring.report import summary, write_report
from rayagi.run.csv_log import read_rows
from rayagi.run.folder import open_run


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its numbers; returns the exit code."""
    folder = open_run(arguments.run)
    path = write_report(folder)
    for key, value in summary(folder, read_rows(folder.progress_csv), read_rows(folder.evaluations_csv)):
        print(f"{key:>18}  {value}")
    print(f"{'report':>18}  {path}")
    return 0
