"""The process of a command: from its arguments to its exit code."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from rayagi.cli.main import main


def run_process() -> NoReturn:
    """Run the command and end the process, without the ends of the native libraries in it.

    Their destructors and threads (two gRPCs, Arrow's allocator, torch) take their time, and can wait for each other for
    ever: a training that was done, saved and reported was seen not to end. What Python has to do at its end is done.
    """
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it has left, or it is closed
            stream.flush()
    os._exit(code)
