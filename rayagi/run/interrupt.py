"""Signal handling. The first Ctrl-C, SIGTERM or SIGHUP requests an end with a save; another Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP, as its terminal closed"}


class Interrupt:
    """Context manager that handles these signals. Does nothing outside the main thread, where Python cannot.

    Only a second Ctrl-C ends a run at once: a closing terminal or a service manager may send two signals. Signals ignored
    at construction stay ignored, as POSIX requires: nohup ignores SIGHUP, and a shell without job control ignores SIGINT in
    background jobs. SIGTERM ends those.
    """

    def __init__(self, on_first: Callable[[], None] = lambda: None) -> None:
        self._on_first = on_first
        self._previous: dict[int, object] = {}
        self._caught = [number for number in _NAMES if signal.getsignal(number) is not signal.SIG_IGN]
        self.requested = False
        """Whether a signal requested the end."""
        self.reason = ""
        """Name of that signal; empty without one."""

    def __enter__(self) -> Interrupt:
        if _in_main_thread():
            for number in self._caught:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self.reason = True, _NAMES[signal.Signals(number)]
            self._on_first()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """Processes started in this block ignore SIGHUP, so that the run can still save when its terminal closes."""
    if not _in_main_thread():
        yield
        return
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
