"""Signals as a terminal's foreground process has them.

A shell starts a background job with SIGINT and SIGQUIT ignored, `nohup` with SIGHUP ignored, and children inherit that.
A test that sends one of these uses the fixture ``default_signals``; a process of the fork server, which may have started
before that test, calls ``set_default_signals`` itself.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

IGNORED_IN_BACKGROUND = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def set_default_signals() -> None:
    """Restore Python's own dispositions of what a shell ignores in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@contextmanager
def default_signals() -> Iterator[None]:
    """The same for a block, and for the processes that it starts."""
    previous = {number: signal.getsignal(number) for number in IGNORED_IN_BACKGROUND}
    set_default_signals()
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
