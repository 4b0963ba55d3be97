"""The TCP port by which members on other hosts notice that this process, or another one of its host, has ended.

One per process and address, opened when it is needed first and never closed: a connection to it ends with the process,
whichever generations and groups come and go in between.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque

DEATH_NOTICE = struct.Struct("<q")
"""What is said to those who are connected: the id of a process of this host that ended."""
_DRAIN_INTERVAL_S = 5.0
"""Between two looks into what others sent to see that it arrives."""
_REMEMBERED_S = 10.0
"""What was announced is said to newcomers for so long after it was withdrawn: who announced it has left a generation, and
others of it may still be on their way to this door. Process ids come again far later."""


class FailureDetectorServer:
    """Accepts connections, and says to each who of this host ended, as long as whoever announced it stands by it."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of the address.

        Raises:
            OSError: the address is not one of this host.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._subscribers: dict[int, socket.socket] = {}
        self._announced: dict[object, set[int]] = {}
        self._withdrawn: deque[tuple[float, set[int]]] = deque()
        """Until when they are remembered, the oldest first."""
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        threading.Thread(target=self._run, name="failure-detector-server", daemon=True).start()

    @property
    def num_subscribers(self) -> int:
        """How many are connected: so many descriptors are others' to close."""
        return len(self._subscribers)

    def announce(self, owner: object, pid: int) -> None:
        """Say to all who are connected, and to who comes until a while after it is withdrawn, that a process ended."""
        with self._lock:
            self._announced.setdefault(owner, set()).add(pid)
            for subscriber in self._subscribers.values():
                _send_death_notice(subscriber, pid)

    def withdraw(self, owner: object) -> None:
        """Soon no longer say what the owner announced: process ids are used again."""
        with self._lock:
            self._forget_expired()
            if pids := self._announced.pop(owner, None):
                self._withdrawn.append((time.monotonic() + _REMEMBERED_S, pids))

    def close_in_child(self) -> None:
        """In a forked child: let go of the connections, or they would outlive the parent that they stand for."""
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._listener.close()
        self._epoll.close()

    def _run(self) -> None:
        while True:
            events = self._epoll.poll(_DRAIN_INTERVAL_S if self._subscribers else None)
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    with self._lock:
                        subscriber = self._subscribers.pop(descriptor)
                    self._epoll.unregister(descriptor)
                    subscriber.close()
            if not events:
                for subscriber in self._subscribers.values():
                    with contextlib.suppress(OSError):
                        subscriber.recv(4096)

    def _accept(self) -> None:
        # No fork in between, or the child would keep a guest that nobody knows of.
        with _servers_lock, self._lock:
            try:
                subscriber, _ = self._listener.accept()
            except OSError:  # it left before it was received
                return
            subscriber.setblocking(False)
            self._subscribers[subscriber.fileno()] = subscriber
            self._forget_expired()
            for pid in set().union(*self._announced.values(), *(pids for _, pids in self._withdrawn)):
                _send_death_notice(subscriber, pid)
        # What it sends is not worth waking up for.
        self._epoll.register(subscriber, select.EPOLLRDHUP)

    def _forget_expired(self) -> None:
        while self._withdrawn and self._withdrawn[0][0] <= time.monotonic():
            self._withdrawn.popleft()


def get_failure_detector_server(address: str) -> FailureDetectorServer:
    """This process's door at an address.

    Raises:
        OSError: the address is not one of this host.
    """
    with _servers_lock:
        if address not in _servers:
            _servers[address] = FailureDetectorServer(address)
        return _servers[address]


def _after_fork_in_child() -> None:
    while _servers:
        _servers.popitem()[1].close_in_child()
    _servers_lock.release()


_servers: dict[str, FailureDetectorServer] = {}
_servers_lock = threading.Lock()
os.register_at_fork(
    before=_servers_lock.acquire,
    after_in_parent=_servers_lock.release,
    after_in_child=_after_fork_in_child,
)


def _send_death_notice(subscriber: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):  # it is leaving
        subscriber.send(DEATH_NOTICE.pack(pid))
