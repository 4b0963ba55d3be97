"""``rayagi replay import``: reads a dataset into a replay, and saves it."""

from __future__ import annotations

import argparse
import os
from shlex import quote

from placement.errors import counted
from rayagi.cli.output import say
from rayagi.cli.replay_progress import loaded
from rayagi.cli.sigterm import ended_by_sigterm
from rayagi.replay.saved import save
from rayagi.run.quantities import bytes_text
from rayagi.serving.errors import ExportError


def run(arguments: argparse.Namespace) -> int:
    """Import; returns the exit code.

    Raises:
        DatasetError: the dataset cannot be read.
        ReplayError: it does not fit into --memory.
        ExportError: the output exists.
        DiskError: it cannot be written; nothing of it is left.
    """
    if os.path.lexists(arguments.out):  # before minutes of reading
        raise ExportError(str(arguments.out), "exists already; choose another folder")
    with ended_by_sigterm(), loaded(arguments, max_length=arguments.max_length) as store:
        size = save(store, arguments.out)
        steps = int(store.status()["length"].sum())
        say(f"{arguments.out}: {counted(len(store), 'row')} of {counted(steps, 'step')}, {bytes_text(size)}")
    say(f"\nNext:\n  rayagi replay sample {quote(str(arguments.out))}")
    return 0
