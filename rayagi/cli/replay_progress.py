"""Progress of reading and writing trajectories, on standard error; and the store that commands sample from."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from actors.replay import ReplayStore
from placement.inventory import limits
from rayagi.cli.failures import UsageError
from rayagi.cli.output import throttled
from rayagi.replay.loading import load
from rayagi.run.quantities import bytes_text

_EVERY_S = 5.0
"""Between two lines if the output is not a terminal. Short work prints none."""
_REFRESH_S = 0.1


@contextmanager
def shown_progress(text: str) -> Iterator[Callable[[int, int], object]]:
    """Shows steps that are done: a bar on a terminal, else a line every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:

        def show_line(done: int, total: int) -> None:
            print(f"{text}: {done:,} of {total:,} steps", file=sys.stderr, flush=True)

        yield throttled(show_line, _EVERY_S, at_once=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)

        def show_bar(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield throttled(show_bar, _REFRESH_S, at_once=False)


def check_batch(store: ReplayStore, arguments: argparse.Namespace, copies: int, row_bytes: int = 0) -> None:
    """Refuse a --batch for which there is no memory, before the kernel ends the process for it.

    Args:
        store: whose columns are copied, all of them
        arguments: of the command, with ``batch`` and ``length``
        copies: of the batch's values
        row_bytes: of a row beside its values

    Raises:
        UsageError: there is not so much memory.
    """
    for column in store.schema.columns:
        steps = arguments.length + column.extra
        row_bytes += copies * steps * (column.step_bytes + 1)  # with its mask
    if (needed := arguments.batch * row_bytes) > (free := limits.available_bytes()):
        reason = (
            f"--batch {arguments.batch}: no memory for so many rows of --length {arguments.length}: they need "
            f"{bytes_text(needed)} where {bytes_text(free)} are free"
        )
        raise UsageError(reason)


def loaded(
    arguments: argparse.Namespace, selectors: Sequence[Any] = (), max_length: int | None = None
) -> ReplayStore:
    """The store of the path that a command was given, within its --memory.

    Raises:
        DatasetError, ReplayError: as of ``load``.
    """
    with shown_progress(f"reading {arguments.path}") as progress:
        return load(
            arguments.path,
            columns=arguments.columns,
            mask=arguments.mask,
            max_length=max_length,
            selectors=selectors,
            memory_bytes=arguments.memory,
            folder=None if arguments.memory is None else tempfile.gettempdir(),
            progress=progress,
        )
