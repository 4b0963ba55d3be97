"""Time of a wait, timeouts for calls that have none, and for asynchronous work of a device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_POLLS = 200
_FIRST_PAUSE_S = 20e-6
_LAST_PAUSE_S = 500e-6

Answer = TypeVar("Answer")


class WaitedTime:
    """Seconds of a wait, for comparison with its limit.

    The time for which this process was stopped does not count: a job that is suspended (SIGSTOP, a paused container) stops
    with all that it waits for.

    Args:
        longest_look_s: the most that counts between two looks; less passes between them unless it is stopped
    """

    def __init__(self, longest_look_s: float = 1.0) -> None:
        self._longest_look_s = longest_look_s
        self._seen_s = time.monotonic()
        self._waited_s = 0.0

    def look(self) -> float:
        """Seconds waited so far."""
        now_s = time.monotonic()
        self._waited_s += min(now_s - self._seen_s, self._longest_look_s)
        self._seen_s = now_s
        return self._waited_s


def call_with_timeout(limit_s: float, call: Callable[[], Answer]) -> Answer:
    """Call in a thread of its own and return the answer, or raise what the call raised.

    A call that does not return stays in its daemon thread, which does not keep the process from exiting.

    Raises:
        TimeoutError: the call did not return within ``limit_s``.
    """
    outcome: queue.SimpleQueue[tuple[Answer, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name=f"limited to {limit_s:.1f} s", daemon=True).start()
    try:
        answer, error = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {limit_s:.1f} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def poll_until_done(is_done: Callable[[], bool], limit_s: float, check: Callable[[], None]) -> None:
    """Poll until it is done: without pauses at first, for work of microseconds, then with growing pauses.

    ``check`` is called between the later polls and may raise to end the wait.

    Raises:
        TimeoutError: not done within ``limit_s``.
    """
    begin = time.monotonic()
    for _ in range(_POLLS):
        if is_done():
            return
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        check()
        if time.monotonic() - begin >= limit_s:
            raise TimeoutError(f"not done within {limit_s:.1f} s")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LAST_PAUSE_S)
