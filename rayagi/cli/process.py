"""Runs a command as a process, and ends it by ``os._exit``."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from rayagi.cli.main import main


def run_process() -> NoReturn:
    """Run the command and end the process, without the exit handlers of native libraries.

    Destructors and threads of these libraries (two gRPCs, Arrow's allocator, torch) are slow and can deadlock: one finished
    and saved training did not end. Python's own exit functions do run.
    """
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(code)
