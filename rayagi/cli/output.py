"""Terminal output. A closed pipe or terminal never ends the command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TextIO

_P = ParamSpec("_P")


def say(text: str) -> None:
    """Write to standard output and flush, so that pipes and log files show it at once."""
    _write(text, sys.stdout)


def complain(text: str) -> None:
    """Write to standard error."""
    _write(text, sys.stderr)


def say_if_temporary(folder: Path) -> None:
    """Say so of a folder in the working directory that a Ray job has brought along."""
    if "working_dir_files" in folder.absolute().parts:
        say(
            f"{folder} is in the job's copy of its working directory, which Ray may delete after the job: "
            "give --out with a folder that stays."
        )


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device: else Python fails again when it flushes at exit."""
    with suppress(OSError, ValueError):  # a stream without a descriptor needs no redirection
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def throttled(show: Callable[_P, object], interval_s: float, *, at_once: bool) -> Callable[_P, None]:
    """``show``, at most once in an interval; for the first time at once, or after an interval."""
    next_at = time.monotonic() + (0.0 if at_once else interval_s)

    def limited(*arguments: _P.args, **named: _P.kwargs) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + interval_s
            show(*arguments, **named)

    return limited


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)
