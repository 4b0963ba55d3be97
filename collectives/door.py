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

NEWS = struct.Struct("<q")
"""What is said to those who are connected: the id of a process of this host that ended."""
_TIDY_S = 5.0
"""Between two looks into what others sent to see that it arrives."""
_REMEMBERED_S = 10.0
"""What was announced is said to newcomers for so long after it was withdrawn: who announced it has left a generation, and
others of it may still be on their way to this door. Process ids come again far later."""


class Door:
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
        self._guests: dict[int, socket.socket] = {}
        self._announced: dict[object, set[int]] = {}
        self._withdrawn: deque[tuple[float, set[int]]] = deque()
        """Until when they are remembered, the oldest first."""
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        threading.Thread(target=self._run, name="liveness-door", daemon=True).start()

    @property
    def num_guests(self) -> int:
        """How many are connected: so many descriptors are others' to close."""
        return len(self._guests)

    def announce(self, owner: object, pid: int) -> None:
        """Say to all who are connected, and to who comes until a while after it is withdrawn, that a process ended."""
        with self._lock:
            self._announced.setdefault(owner, set()).add(pid)
            for guest in self._guests.values():
                _say(guest, pid)

    def withdraw(self, owner: object) -> None:
        """Soon no longer say what the owner announced: process ids are used again."""
        with self._lock:
            self._forget()
            if pids := self._announced.pop(owner, None):
                self._withdrawn.append((time.monotonic() + _REMEMBERED_S, pids))

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the connections, or they would outlive the parent that they stand for."""
        for guest in self._guests.values():
            guest.close()
        self._listener.close()
        self._epoll.close()

    def _run(self) -> None:
        while True:
            events = self._epoll.poll(_TIDY_S if self._guests else None)
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    self._accept()
                else:
                    with self._lock:
                        guest = self._guests.pop(descriptor)
                    self._epoll.unregister(descriptor)
                    guest.close()
            if not events:
                for guest in self._guests.values():
                    with contextlib.suppress(OSError):
                        guest.recv(4096)

    def _accept(self) -> None:
        # No fork in between, or the child would keep a guest that nobody knows of.
        with _doors_lock, self._lock:
            try:
                guest, _ = self._listener.accept()
            except OSError:  # it left before it was received
                return
            guest.setblocking(False)
            self._guests[guest.fileno()] = guest
            self._forget()
            for pid in set().union(*self._announced.values(), *(pids for _, pids in self._withdrawn)):
                _say(guest, pid)
        # What it sends is not worth waking up for.
        self._epoll.register(guest, select.EPOLLRDHUP)

    def _forget(self) -> None:
        while self._withdrawn and self._withdrawn[0][0] <= time.monotonic():
            self._withdrawn.popleft()


def door(address: str) -> Door:
    """This process's door at an address.

    Raises:
        OSError: the address is not one of this host.
    """
    with _doors_lock:
        if address not in _doors:
            _doors[address] = Door(address)
        return _doors[address]


def _after_fork_in_child() -> None:
    while _doors:
        _doors.popitem()[1].leave_to_parent()
    _doors_lock.release()


_doors: dict[str, Door] = {}
_doors_lock = threading.Lock()
os.register_at_fork(
    before=_doors_lock.acquire,
    after_in_parent=_doors_lock.release,
    after_in_child=_after_fork_in_child,
)


def _say(guest: socket.socket, pid: int) -> None:
    with contextlib.suppress(OSError):  # it is leaving
        guest.send(NEWS.pack(pid))
