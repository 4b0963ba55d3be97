"""``rayagi profile diff``: compares two profiles."""

from __future__ import annotations

import argparse

from rayagi.profiler.difference import difference_text, differences
from rayagi.profiler.overlap import breakdown
from rayagi.profiler.trace import read_profile


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code.

    Raises:
        TraceError: a folder is no profile, or a file of it is damaged.
    """
    first, second = (breakdown(read_profile(path)) for path in (arguments.first, arguments.second))
    print(difference_text(differences(first, second)))
    return 0
