"""The recorder in C: compiled once, then taken from the cache of compiled programs."""

from __future__ import annotations

import ctypes
import logging
import sys
import sysconfig
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from collectives.compiler import CompilerError, load
from rayagi.profiler import layout
from rayagi.profiler.layout import Category

_logger = logging.getLogger(__name__)
SOURCES = ("recorder.c", "interception.c", "module.c")


class EventRecorder(Protocol):
    """Records events of the calling thread. One per process; in C, or in Python where C cannot be compiled.

    Names are ids of names.jsonl; categories are values of Category; modes are OFF, WARM_UP and RECORD.
    """

    def setup(self, folder: str, limit_bytes: int, /) -> None:
        """Begin a session: its files lie in this folder and take at most this many bytes."""

    def start(self, mode: int, process_name: int, /) -> None:
        """Begin a window of recording, or of warming up: the same work, but nothing is kept."""

    def stop(self) -> None:
        """End the window."""

    def begin(self, category: int, name: int, flags: int, /) -> None:
        """Open a scope. Allowed between windows: a window begins with the scopes that are open."""

    def end(self, category: int, name: int, /) -> int | None:
        """Close a scope, and all that are open in it.

        Returns:
            None if it was the innermost or was opened before the session, else the name of the innermost.
        """

    def record(self, start: int, end: int, category: int, name: int, depth: int, /) -> None:
        """Record an event that has ended; times in ns of CLOCK_MONOTONIC."""

    def lost(self) -> int:
        """Number of events of this session whose thread could not make a file."""


OFF, WARM_UP, RECORD = range(3)
_MIRRORS = {
    "OFF": OFF,
    "WARM_UP": WARM_UP,
    "RECORD": RECORD,
    "PROCESS": Category.PROCESS,
    "THREAD": Category.THREAD,
    "MAX_DEPTH": layout.MAX_DEPTH,
    "FROM_PYTHON": layout.FROM_PYTHON,
    "sizeof(Record)": layout.RECORD.size,
    "offsetof(Record, end)": layout.END_AT,
    "sizeof(Header)": layout.HEADER.size,
    "offsetof(Header, committed)": layout.COMMITTED_AT,
    "offsetof(Header, dropped)": layout.DROPPED_AT,
    "offsetof(Header, dropped_from)": layout.DROPPED_FROM_AT,
}


@cache
def load_native() -> Any | None:
    """The module in C, which is a Recorder; None, with a warning, where it cannot be compiled."""
    try:
        return compile_native()
    except CompilerError as error:
        reason = str(error).splitlines()[0]
        what = "records from Python, which is slower, and no calls but those of simulators"
        _logger.warning("the profiler %s: %s", what, reason)
        return None


@cache
def compile_native() -> Any:
    """Compile and load the module.

    Raises:
        CompilerError: no compiler, or no headers of this Python.
    """
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        raise CompilerError(f"no Python.h in {include}; install the headers of this Python (python3-dev)")
    program = "\n".join(files(__package__).joinpath(each).read_text(encoding="utf-8") for each in SOURCES)
    # The version is part of the cache's key: headers differ even where the folder is the same.
    flags = (f"-I{include}", f'-DPYTHON_VERSION="{sys.version.split()[0]}"')
    library = load(program, flags, mirrors=_MIRRORS)
    make = ctypes.PyDLL(None, handle=library._handle).make_module
    make.restype = ctypes.py_object
    return make()
