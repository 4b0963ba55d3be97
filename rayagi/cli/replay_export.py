"""``rayagi replay export``: writes any dataset, or a saved replay, in any format."""

from __future__ import annotations

import argparse

from placement.errors import counted
from rayagi.cli.output import say
from rayagi.cli.replay_progress import shown_progress
from rayagi.cli.sigterm import ended_by_sigterm
from rayagi.replay.exports import export
from rayagi.replay.loading import open_source


def run(arguments: argparse.Namespace) -> int:
    """Write it; returns the exit code.

    Raises:
        DatasetError: the source cannot be read.
        ExportError: the output exists, or the format cannot have these columns.
        DiskError: it cannot be written; nothing of it is left.
    """
    source = open_source(arguments.path, columns=arguments.columns, mask=arguments.mask)
    with ended_by_sigterm(), shown_progress(f"writing {arguments.out}") as progress:
        count = export(source, arguments.out, arguments.to, progress)
    say(
        f"{arguments.out}: {counted(count, 'trajectory', 'trajectories')} "
        f"of {counted(source.num_steps, 'step')} as {arguments.to}"
    )
    return 0
