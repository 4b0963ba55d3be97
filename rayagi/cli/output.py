"""Text for people. A pipe whose reader left, or a terminal that was closed, never ends what the text is about."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(text: str) -> None:
    """Write to standard output at once, so that a pipe or a log file shows it when it happens."""
    _write(text, sys.stdout)


def complain(text: str) -> None:
    """Write to standard error."""
    _write(text, sys.stderr)


def silence(stream: TextIO) -> None:
    """Send nowhere what a stream is still given: Python would otherwise fail on it once more at exit."""
    with suppress(OSError, ValueError):  # a stream without a descriptor has nothing to redirect
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _write(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except OSError:
        silence(stream)
