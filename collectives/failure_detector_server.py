"""TCP server of the failure detector: lets other hosts notice the end of this process, and of others on its host.

Other hosts' failure detectors connect as subscribers. Their connection closes when this process ends. When another process
of this host ends, the server sends them a death notice. There is one server per process and address. It starts at first
use and is never closed: it serves all groups and generations of the process.
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
"""Sent to subscribers: the id of a process of this host that ended."""
_DRAIN_INTERVAL_S = 5.0
"""Between two reads of the subscribers' heartbeats, which are discarded."""
_REMEMBERED_S = 10.0
"""New subscribers get a death notice for so long after it was withdrawn. Its owner has left the generation, while other
members of it may still be connecting. Process ids are reused far later."""


class FailureDetectorServer:
    """Accepts subscribers and sends them death notices, each until its owner withdraws it."""

    def __init__(self, address: str) -> None:
        """Listen on a free port of the address. Raises OSError where the address is not one of this host."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._subscribers: dict[int, socket.socket] = {}
        self._announced: dict[object, set[int]] = {}
        """Process ids by owner."""
        self._withdrawn: deque[tuple[float, set[int]]] = deque()
        """Time of expiry and process ids, the oldest first."""
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        threading.Thread(target=self._run, name="failure-detector-server", daemon=True).start()

    @property
    def num_subscribers(self) -> int:
        """Open subscriber connections; the subscribers close them."""
        return len(self._subscribers)

    def announce(self, owner: object, pid: int) -> None:
        """Send a death notice to all subscribers, now and when they connect, until a while after ``withdraw``."""
        with self._lock:
            self._announced.setdefault(owner, set()).add(pid)
            for subscriber in self._subscribers.values():
                _send_death_notice(subscriber, pid)

    def withdraw(self, owner: object) -> None:
        """Expire the owner's death notices in ``_REMEMBERED_S``, since process ids are reused."""
        with self._lock:
            self._forget_expired()
            if pids := self._announced.pop(owner, None):
                self._withdrawn.append((time.monotonic() + _REMEMBERED_S, pids))

    def close_in_child(self) -> None:
        """Close the connections in a forked child: otherwise they would stay open after the parent ends."""
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
                else:  # EPOLLRDHUP: the subscriber has closed
                    with self._lock:
                        subscriber = self._subscribers.pop(descriptor)
                    self._epoll.unregister(descriptor)
                    subscriber.close()
            if not events:  # drain the heartbeats
                for subscriber in self._subscribers.values():
                    with contextlib.suppress(OSError):
                        subscriber.recv(4096)

    def _accept(self) -> None:
        # The lock excludes a fork between accept and the table: the child would keep a connection that it cannot close.
        with _servers_lock, self._lock:
            try:
                subscriber, _ = self._listener.accept()
            except OSError:  # closed before it was accepted
                return
            subscriber.setblocking(False)
            self._subscribers[subscriber.fileno()] = subscriber
            self._forget_expired()
            for pid in set().union(*self._announced.values(), *(pids for _, pids in self._withdrawn)):
                _send_death_notice(subscriber, pid)
        # Not EPOLLIN: a heartbeat must not wake this thread.
        self._epoll.register(subscriber, select.EPOLLRDHUP)

    def _forget_expired(self) -> None:
        while self._withdrawn and self._withdrawn[0][0] <= time.monotonic():
            self._withdrawn.popleft()


def get_failure_detector_server(address: str) -> FailureDetectorServer:
    """This process's server at an address, started if there is none.

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
    before=_servers_lock.acquire, after_in_parent=_servers_lock.release, after_in_child=_after_fork_in_child
)


def _send_death_notice(subscriber: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):  # the subscriber is closing
        subscriber.send(DEATH_NOTICE.pack(pid))
