"""``rayagi replay export``: writes a dataset or a saved replay in another format."""

from __future__ import annotations

import argparse

from rayagi.cli.output import say
from rayagi.cli.replay_progress import shown_progress
from rayagi.replay.exports import export
from rayagi.replay.loading import open_source


def run(arguments: argparse.Namespace) -> int:
    """Write it; returns the exit code.

    Raises:
        DatasetError: the source cannot be read.
        ExportError: the output exists, or the format cannot have these columns.
        DiskError: it cannot be written; nothing of it is left.
    """
    source = open_source(arguments.path, columns=arguments.columns)
    with shown_progress(f"writing {arguments.out}") as progress:
        count = export(source, arguments.out, arguments.to, progress)
    say(f"{arguments.out}: {count:,} trajectories of {source.num_steps:,} steps as {arguments.to}")
    return 0
