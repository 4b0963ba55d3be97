"""Signals. In a run the first Ctrl-C, SIGTERM or SIGHUP requests an end with a save; another Ctrl-C ends at once."""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ClassVar

END_LIMIT_S = 15.0
"""After a signal, how long the running request may take beyond twice the duration of the last one."""
EARLY_LIMIT_S = 30.0
"""After a signal while there is nothing to save, how long until the process is ended. Ray may take 10 s to shut down."""
_AGAIN_S = 0.02
_WITH_LOCKS = (
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
    logging.__file__,
    weakref.__file__,
)
"""Files whose callbacks hold locks: of imports, and of forks."""
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
        self._defers_hangup = self._is_over = self._is_overdue = self._is_late = False
        self._wait_limit_s: float | None = None
        self._wait_lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.requested = False
        """Whether a signal requested the end."""
        self.reason = ""
        """Name of that signal; empty without one."""

    def __enter__(self) -> Interrupt:
        if _in_main_thread():
            for number in self._caught:
                self._previous[number] = signal.signal(number, self._handle)
            early = EarlyEnd.current
            if early is not None and early.reason:  # what its handler raised was dropped
                early.cancel()
                self.requested, self.reason = True, early.reason
                self._on_first()
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

    @contextmanager
    def wait_limited(self, limit_s: float) -> Iterator[None]:
        """A wait for GMIs, which ends with KeyboardInterrupt ``limit_s`` after the end was requested. Not to be nested.

        An environment's step() may never return.
        """
        self._wait_limit_s = limit_s
        try:
            if self.requested:
                self._begin_limit(limit_s)
            yield
        except KeyboardInterrupt as error:
            if self._is_late:  # Ray raises one of its own instead of the handler's
                error.args = (f"{self.reason}, and no answer of the GMIs for {limit_s:.0f} s",)
            raise
        finally:
            with self._wait_lock:  # else the timer's signal might come when nothing handles it any more
                self._wait_limit_s = None
            if self._timer is not None:
                self._timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            return  # a closing terminal, while everything ends
        if self._is_overdue:  # the timer's signal
            self._is_overdue = False
            if self._wait_limit_s is not None:  # else the GMIs have answered at the last moment
                self._is_late = True
                raise KeyboardInterrupt
        elif not self.requested:
            self.requested, self.reason = True, _NAMES[signal.Signals(number)]
            if self._wait_limit_s is not None:
                self._begin_limit(self._wait_limit_s)
            with suppress(RuntimeError):  # Python raises if the signal interrupted another print
                self._on_first()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _begin_limit(self, limit_s: float) -> None:
        """End the wait after its limit."""
        if self._previous:  # else this handles no signal
            self._timer = threading.Timer(limit_s, self._end_wait)
            self._timer.daemon = True  # the process does not wait for it
            self._timer.start()

    def _end_wait(self) -> None:
        """Send one of the signals to the main thread: nothing but its handler can end a wait there."""
        with self._wait_lock:
            if self._wait_limit_s is not None:
                self._is_overdue = True
                signal.pthread_kill(threading.main_thread().ident or 0, self._caught[0])


class EarlyEnd:
    """Context manager while there is nothing to save: Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread.

    Python drops what a handler raises in some callbacks, and leaves the lock that they hold: of an import, say, after which
    the next import waits forever. So a signal waits until none of these is running; and what has not ended some time after
    it is ended without the main thread.
    """

    current: ClassVar[EarlyEnd | None] = None
    """The one that is entered."""

    def __init__(self, on_overdue: Callable[[str], None], limit_s: float = EARLY_LIMIT_S) -> None:
        """``on_overdue``: ends the process, in another thread, ``limit_s`` after a signal, whose name it is given."""
        self._on_overdue, self._limit_s = on_overdue, limit_s
        self._previous: dict[int, object] = {}
        self._timers: list[threading.Timer] = []
        self.reason = ""
        """Name of the first signal; empty without one."""

    def __enter__(self) -> EarlyEnd:
        if _in_main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
            EarlyEnd.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        EarlyEnd.current = None

    def cancel(self) -> None:
        """The end has come, or somebody else sees to it."""
        for timer in self._timers:
            timer.cancel()

    def _start_timer(self, after_s: float, call: Callable[..., object], *given: object) -> None:
        timer = threading.Timer(after_s, call, given)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.reason:
            self.reason = _NAMES[signal.Signals(number)]
            self._start_timer(self._limit_s, self._on_overdue, self.reason)
        if frame is not None and frame.f_code.co_filename in _WITH_LOCKS:
            self._start_timer(_AGAIN_S, signal.pthread_kill, threading.main_thread().ident, number)
        else:
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
