"""What a process has one of, and rayagi needs: an environment's code may change it for itself, and not for the run."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the standard streams, and what the signals do that end a run.

    Other signals stay: an environment that is stepped later may need its handlers, such as of an alarm.
    """
    with _streams_kept(), _handlers_kept(_ENDING):
        yield


@contextmanager
def all_process_state_kept() -> Iterator[None]:
    """Restore the standard streams, what every signal does, and the alarm: for an environment that is not used."""
    with _streams_kept(), _handlers_kept(signal.valid_signals()), _alarm_kept():
        yield


@contextmanager
def _streams_kept() -> Iterator[None]:
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def _handlers_kept(numbers: Iterable[int]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: it was set by C code, and Python cannot set it again. Elsewhere than in the main thread it sets none.
            if handler is not None and signal.getsignal(number) is not handler and _in_main_thread():
                signal.signal(number, handler)


@contextmanager
def _alarm_kept() -> Iterator[None]:
    """The timer of SIGALRM, which goes on meanwhile."""
    left_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    began = time.monotonic()
    try:
        yield
    finally:
        if left_s:
            left_s = max(left_s - (time.monotonic() - began), 1e-3)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
