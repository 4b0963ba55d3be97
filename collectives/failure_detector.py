"""Who of the other members is gone: noticed within 2 s, whatever they and this process are doing.

A thread sleeps until the kernel has news. Of a member of this host that is the end of its process, by a descriptor of
the process. Of another host that is the end of a TCP connection to the door of the group's first member there: it closes
when that process ends, and when the host is silent for longer than TCP_USER_TIMEOUT; and that member says through it
which others of its host it sees ending. The only work in between is a byte on each such connection, twice a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from collectives.errors import MemberLostError
from collectives.failure_detector_server import DEATH_NOTICE, get_failure_detector_server
from collectives.rendezvous import Member

_HEARTBEAT_S = 0.5
_HEARTBEAT_TIMEOUT_S = 1.2
"""After which a host that acknowledges nothing is gone; with a beat before, 1.7 s."""
_ENDED = "its process has ended"

OnLost = Callable[[tuple[Member, ...]], None]


@dataclass(slots=True)
class _Link:
    """A connection to a member that cannot be watched as a process."""

    socket: socket.socket
    member: Member
    received_bytes: bytes = b""
    """Of news that has not arrived in full."""


class FailureDetector:
    """Watches the members that it was told of until it is closed.

    A loss is final. It does not end waits by itself: they call ``check`` when what they wait for has not come, or are
    woken by ``on_lost``. A member that closes its own does not get lost by that: processes are watched, not groups.
    """

    def __init__(self, me: Member, on_lost: OnLost | None = None) -> None:
        """Open this process's door at ``me.address``, if it is not open yet.

        Args:
            me: this process
            on_lost: called with who was just lost, on the watching thread or by ``watch``; must neither block nor raise

        Raises:
            OSError: the address is not one of this host.
        """
        self._server = get_failure_detector_server(me.address)
        self.me = replace(me, port=self._server.port)
        """This member, as the others need to know it."""
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], Member] = {}
        self._lost: dict[tuple[str, int], tuple[Member, str]] = {}
        self._processes: dict[int, Member] = {}
        self._links: dict[int, _Link] = {}
        self._linked: set[tuple[str, int]] = set()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"failure-detector-{me.rank}", daemon=True)
        self._thread.start()

    def watch(self, members: Iterable[Member]) -> None:
        """Watch these too. Those that are gone already are lost when this returns.

        Members of other hosts are watched once their port is known. Once it is closed nobody is.
        """
        for member in members:
            if member.process == self.me.process:
                continue
            known = self._known.get(member.process)
            self._known[member.process] = member if known is None or not known.port else known
            if known is None and member.host_id == self.me.host_id:
                self._watch_process(member)
        hosts = {member.host_id for member in self._known.values()} - {self.me.host_id}
        for host_id in hosts:
            there = [member for member in self._of_host(host_id) if member.port]
            there = [member for member in there if member.process not in self._lost]
            first = min(there, key=lambda member: member.rank, default=None)
            if first is not None:
                self._connect_to(first)

    def lost(self) -> tuple[Member, ...]:
        """Who is gone, in the order in which that was noticed."""
        return tuple(member for member, _ in list(self._lost.values()))

    def check(self, operation: str, step: str = "", waited_s: float = 0.0) -> None:
        """Raise if anyone is gone. Costs nothing otherwise.

        Raises:
            MemberLostError: with these facts.
        """
        if self._lost:
            reasons = dict.fromkeys(reason for _, reason in list(self._lost.values()))
            raise MemberLostError(
                operation, self.me.rank, self.lost(), waited_s, step, reason="; ".join(reasons)
            )

    def close(self) -> None:
        """Free thread and descriptors. Safe to call twice, and in ``on_lost``."""
        with self._lock:  # while it is held the thread, which may be awake, closes nothing
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch_process(self, member: Member) -> None:
        try:
            descriptor = os.pidfd_open(member.pid)
        except ProcessLookupError:
            self._record_loss(member, _ENDED)
        except OSError:  # a kernel without such descriptors
            if member.port:
                self._connect_to(member)
        else:
            with self._lock:
                if self._closing:
                    os.close(descriptor)
                    return
                self._processes[descriptor] = member
                self._epoll.register(descriptor, select.EPOLLIN)

    def _connect_to(self, member: Member) -> None:
        """Connect, once, to a member that cannot be watched as a process."""
        if member.process in self._linked:
            return
        self._linked.add(member.process)
        try:
            link = socket.create_connection((member.address, member.port), timeout=_HEARTBEAT_TIMEOUT_S)
        except (ConnectionRefusedError, ConnectionResetError):
            self._record_loss(member, _ENDED)
            return
        except OSError as error:
            self._record_host_loss(member, f"its host does not answer at {member.address}: {error}")
            return
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _HEARTBEAT_TIMEOUT_S))
        with self._lock:
            if self._closing:
                link.close()
                return
            self._links[link.fileno()] = _Link(link, member)
            self._epoll.register(link, select.EPOLLIN | select.EPOLLRDHUP)
            os.eventfd_write(self._wake, 1)  # from now on there is a beat to keep

    def _record_loss(self, member: Member, reason: str) -> None:
        """Note a loss, once; tell members of other hosts if it is ours to tell, and who waits here."""
        with self._lock:
            if member.process in self._lost or self._closing:
                return
            self._lost[member.process] = (member, reason)
            if member.host_id == self.me.host_id:
                self._server.announce(self, member.pid)
        if self._on_lost is not None:
            self._on_lost((member,))

    def _record_host_loss(self, member: Member, reason: str) -> None:
        for other in self._of_host(member.host_id):
            self._record_loss(other, reason)

    def _of_host(self, host_id: str) -> list[Member]:
        return [member for member in list(self._known.values()) if member.host_id == host_id]

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closing:
            timeout_s = max(0.0, next_beat - time.monotonic()) if self._links else None
            for descriptor, _ in self._epoll.poll(timeout_s):
                self._handle(descriptor)
            if self._links and time.monotonic() >= next_beat:
                self._send_heartbeat()
                next_beat = time.monotonic() + _HEARTBEAT_S
        self._release()

    def _handle(self, descriptor: int) -> None:
        if descriptor == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif descriptor in self._processes:
            member = self._processes.pop(descriptor)
            self._epoll.unregister(descriptor)
            os.close(descriptor)
            self._record_loss(member, _ENDED)
        else:
            self._receive_death_notices(descriptor)

    def _receive_death_notices(self, descriptor: int) -> None:
        """News of another host, or the end of its first member."""
        link = self._links[descriptor]
        silence = None
        try:
            received = link.socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it ended with unread beats
            received = b""
        except OSError as error:
            received, silence = b"", f"its host is silent: {error.strerror}"
        link.received_bytes += received
        whole = len(link.received_bytes) // DEATH_NOTICE.size * DEATH_NOTICE.size
        for (pid,) in DEATH_NOTICE.iter_unpack(link.received_bytes[:whole]):
            other = self._known.get((link.member.host_id, pid))
            if other is not None:
                self._record_loss(other, _ENDED)
        link.received_bytes = link.received_bytes[whole:]
        if received:
            return
        del self._links[descriptor]
        self._epoll.unregister(descriptor)
        link.socket.close()
        if silence is not None:
            self._record_host_loss(link.member, silence)
        else:
            self._record_loss(link.member, _ENDED)

    def _send_heartbeat(self) -> None:
        """Give the kernel something to be acknowledged."""
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # a broken link is heard of
                link.socket.send(b"\0")

    def _release(self) -> None:
        with self._lock:
            self._server.withdraw(self)
            for descriptor in self._processes:
                os.close(descriptor)
            for link in self._links.values():
                link.socket.close()
            self._epoll.close()
            os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
