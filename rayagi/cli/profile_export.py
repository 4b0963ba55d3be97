"""``rayagi profile export``: writes a profile as a Perfetto trace, or as a table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import BinaryIO

from collectives.files import replacing
from placement.errors import counted
from rayagi.cli.failures import UsageError
from rayagi.profiler.chrome_trace import ForeignProcess, read_chrome_trace
from rayagi.profiler.perfetto import write_perfetto
from rayagi.profiler.trace import Profile, read_profile
from rayagi.run.atomic import is_special
from rayagi.run.errors import disk_errors

_TABLES = (".arrow", ".parquet")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, which appears when it is complete; returns the exit code.

    Raises:
        UsageError: the file is a folder, a pipe or a device; traces to merge into a table.
        TraceError: the folder is no profile, a file of it is damaged, or one to merge is no trace.
        DiskError: the file cannot be written.
    """
    path = arguments.out
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name the file to write")
    if is_special(path):
        raise UsageError(f"{path} is a pipe or a device, which would be replaced; name a file")
    is_table = path.suffix in _TABLES
    if is_table and arguments.merge:
        raise UsageError(
            f"--merge is for Perfetto traces; {path.name} is a table of the profile's own events"
        )
    profile = read_profile(arguments.profile)
    others = [process for each in arguments.merge for process in read_chrome_trace(each)]
    with disk_errors(path), replacing(path) as beside, beside.open("wb") as file:
        count = _write(profile, file, path.suffix, others)
    note = "" if is_table else "; open it at https://ui.perfetto.dev"
    print(f"{path}: {counted(count, 'event')}{note}")
    return 0


def _write(profile: Profile, file: BinaryIO, suffix: str, others: Sequence[ForeignProcess]) -> int:
    if suffix not in _TABLES:
        return write_perfetto(profile, file, others)
    # pyarrow takes a tenth of a second to import, for which other exports need not wait.
    from rayagi.profiler.arrow import write_arrow

    return write_arrow(profile, file, "parquet" if suffix == ".parquet" else "arrow")
