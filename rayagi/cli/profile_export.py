"""``rayagi profile export``: writes a profile as a Perfetto trace."""

from __future__ import annotations

import argparse
import os

from placement.errors import counted
from rayagi.cli.failures import UsageError
from rayagi.profiler.chrome_trace import read_chrome_trace
from rayagi.profiler.perfetto import write_perfetto
from rayagi.profiler.trace import read_profile
from rayagi.run.errors import disk_errors


def run(arguments: argparse.Namespace) -> int:
    """Write the file, which appears when it is complete; returns the exit code.

    Raises:
        UsageError: the file is a folder.
        TraceError: the folder is no profile, a file of it is damaged, or one to merge is no trace.
        DiskError: the file cannot be written.
    """
    path = arguments.out
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the file to write")
    profile = read_profile(arguments.profile)
    others = [process for each in arguments.merge for process in read_chrome_trace(each)]
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path):
        try:
            with beside.open("wb") as file:
                count = write_perfetto(profile, file, others)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    print(f"{path}: {counted(count, 'event')}; open it at https://ui.perfetto.dev")
    return 0
