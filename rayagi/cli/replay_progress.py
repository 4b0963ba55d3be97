"""Progress of reading and writing trajectories, on standard error; and the store that commands sample from."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from actors.replay import ReplayStore
from rayagi.replay.loading import load

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

        yield _every(_EVERY_S, show_line)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield _every(_REFRESH_S, lambda done, total: bar.update(task, completed=done, total=total))


def _every(
    interval_s: float, show: Callable[[int, int], object], clock: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    next_at = clock() + interval_s

    def progress(done: int, total: int) -> None:
        nonlocal next_at
        if clock() >= next_at:
            next_at = clock() + interval_s
            show(done, total)

    return progress


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
            max_length=max_length,
            selectors=selectors,
            memory_bytes=arguments.memory,
            folder=None if arguments.memory is None else tempfile.gettempdir(),
            progress=progress,
        )
