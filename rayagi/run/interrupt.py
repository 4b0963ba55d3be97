"""Signal handling. The first Ctrl-C, SIGTERM or SIGHUP requests an end with a save; another Ctrl-C ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
        self._defers_hangup = self._is_over = False
        self.requested = False
        """Whether a signal requested the end."""
        self.reason = ""
        """Name of that signal; empty without one."""

    def __enter__(self) -> Interrupt:
        if _in_main_thread():
            for number in self._caught:
                self._previous[number] = signal.signal(number, self._handle)
            if self._defers_hangup:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        if self._defers_hangup:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    @contextmanager
    def hangup_deferred(self) -> Iterator[None]:
        """For what is started before this is entered, and ended after it: there, too, a closing terminal requests the end.

        Processes started in this block inherit that SIGHUP is blocked: they are there as long as the run saves.
        """
        if not _in_main_thread() or signal.SIGHUP not in self._caught:
            yield
            return
        previous = signal.signal(signal.SIGHUP, self._handle)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        self._defers_hangup = True
        try:
            yield
        finally:
            self._defers_hangup, self._is_over = False, True
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            signal.signal(signal.SIGHUP, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            return  # a closing terminal, while everything ends
        if not self.requested:
            self.requested, self.reason = True, _NAMES[signal.Signals(number)]
            with suppress(RuntimeError):  # Python raises if the signal interrupted another print
                self._on_first()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
