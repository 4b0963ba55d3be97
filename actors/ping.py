"""Pings between the driver and the GMIs: they tell a process that computes for long from one that is stopped or stuck.

Each GMI answers pings on a thread of its own, whatever its program does, and says where in the code the program is: an
environment whose step() never returns is found so. A program does not move to another thread for that, as with Ray's
concurrency groups: simulators may need the main thread.
"""

from __future__ import annotations

import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import FrameType

Address = tuple[str, int]
"""Host and port of a GMI's ping server."""

PING_INTERVAL_S = 5.0
"""Between two pings of a GMI while its answer to a call is awaited."""
PING_TIMEOUT_S = 1.0
"""For one ping: the connection, and the answer."""
_ANSWER = b"."
_STDLIB = sysconfig.get_path("stdlib")


class PingServer:
    """Answers each connection, on a daemon thread, until the process ends: with a byte, and its code position."""

    def __init__(self, host: str) -> None:
        """Listen on a free port. The code position is that of the calling thread.

        Raises:
            OSError: ``host`` is no address of this host.
        """
        self._thread = threading.get_ident()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self.address: Address = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._run, name="ping server", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # this process has no descriptor left
                time.sleep(PING_TIMEOUT_S)
                continue
            with connection, suppress(OSError):  # the client has closed the connection
                connection.sendall(_ANSWER + _code_position_of(self._thread).encode(errors="replace"))


def is_stopped(address: Address) -> bool:
    """Whether a process accepts a connection and does not answer. False where no connection can be made.

    The kernel accepts connections for a process that does not run. A refused one says that the process has ended, which
    Ray reports; one without any answer may be a firewall's.
    """
    try:
        connection = socket.create_connection(address, PING_TIMEOUT_S)
    except OSError:
        return False
    with connection:
        try:
            return connection.recv(1) != _ANSWER
        except TimeoutError:
            return True
        except OSError:  # it ended in between
            return False


def code_position(address: Address) -> str:
    """Where the thread is that has made a process's ping server: ``FILE:LINE in FUNCTION``; empty if it does not answer."""
    try:
        with socket.create_connection(address, PING_TIMEOUT_S) as connection:
            answer = b"".join(iter(partial(connection.recv, 4096), b""))
    except OSError:
        return ""
    return answer.removeprefix(_ANSWER).decode(errors="replace")


def _code_position_of(thread: int) -> str:
    """Of the innermost frame outside of Python's own library, in which a program may wait."""
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_of_python(frame):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_of_python(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith((_STDLIB, "<frozen ")) and "-packages" not in path


class PingMonitor:
    """Pings GMIs whose answers are awaited.

    Args:
        silence_s: a process that has answered no ping for so long is stopped or stuck
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._addresses: dict[int, Address] = {}
        self._due_s: dict[int, float] = {}
        self._silent_since_s: dict[int, float] = {}

    def add(self, index: int, address: Address | None) -> None:
        """Record where a GMI's process answers; None: nowhere, so that it never counts as silent."""
        self.remove(index)
        if address is not None:
            self._addresses[index] = address

    def remove(self, index: int) -> None:
        """Forget a process that is replaced."""
        for values in (self._addresses, self._due_s, self._silent_since_s):
            values.pop(index, None)

    def silent(self, indices: Iterable[int]) -> list[int]:
        """Ping those of the GMIs whose ping is due; returns those that have been silent for too long."""
        now_s = time.monotonic()
        due = [index for index in dict.fromkeys(indices) if now_s >= self._due_s.get(index, now_s)]
        # Judged right after a ping: a driver that was stopped itself knows nothing about the time in between.
        return [
            index for index in self.stopped(due) if now_s - self._silent_since_s[index] >= self._silence_s
        ]

    def stopped(self, indices: Iterable[int]) -> list[int]:
        """Ping GMIs now; returns those whose process does not answer."""
        found = []
        for index in indices:
            if index not in self._addresses:
                continue
            begun_s = time.monotonic()
            self._due_s[index] = begun_s + PING_INTERVAL_S
            if is_stopped(self._addresses[index]):
                self._silent_since_s.setdefault(index, begun_s)
                found.append(index)
            else:
                self._silent_since_s.pop(index, None)
        return found

    def code_position(self, index: int) -> str:
        """Where a GMI's program is, as ``code_position`` of this module; empty if it does not answer."""
        return code_position(self._addresses[index]) if index in self._addresses else ""

    def reason(self, index: int) -> str:
        """Since when the process of a silent GMI has answered nothing, for the error."""
        silent_s = time.monotonic() - self._silent_since_s[index]
        return (
            f"its process has answered nothing for {silent_s:.0f} s, so it is stopped or stuck (where native code "
            "keeps Python's lock for so long, raise gmi.collective_timeout_s)"
        )
