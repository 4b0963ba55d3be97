"""Failure detector. Reports a lost peer within 2 s, whatever the peers and this process are doing.

A thread sleeps in epoll until one of these events:

- A process of this host ends: its pidfd becomes readable.
- A process of another host ends. This process is connected by TCP to the first member of each other host
  (``failure_detector_server.py``). The connection closes if that member ends. For the other processes of its host that
  member sends a death notice.
- A host is unreachable: a heartbeat byte, sent every 0.5 s, is not acknowledged within TCP_USER_TIMEOUT (1.2 s).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from collectives.closing import ClosesOnExit
from collectives.errors import CommunicatorError, MemberLostError
from collectives.failure_detector_server import DEATH_NOTICE, get_failure_detector_server
from collectives.rendezvous import Member

_HEARTBEAT_S = 0.5
_HEARTBEAT_TIMEOUT_S = 1.2
"""A host that acknowledges nothing for so long is lost; with a heartbeat interval before it, after 1.7 s."""
_ENDED = "its process has ended"
_OWN_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""What this process or host lacks says nothing of another process."""


@dataclass(slots=True)
class _Link:
    """A connection to a member whose process has no pidfd here: usually the first member of another host."""

    socket: socket.socket
    member: Member
    received_bytes: bytes = b""
    """Of a death notice that has not arrived in full."""


class FailureDetector(ClosesOnExit):
    """Watches the members given to ``watch`` until it is closed.

    A loss is final. It does not end waits by itself: a wait calls ``check`` regularly.
    It watches processes, not groups: a member that closes its failure detector is not lost.
    """

    def __init__(self, me: Member) -> None:
        """Start the watching thread, and this process's server at ``me.address`` if none runs yet.

        Raises:
            OSError: the address is not one of this host.
        """
        self._server = get_failure_detector_server(me.address)
        self.me = replace(me, port=self._server.port)
        """This member, with the port of its server."""
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], Member] = {}
        self._lost: dict[tuple[str, int], tuple[Member, str]] = {}
        """Lost members and the reason, by process."""
        self._processes: dict[int, Member] = {}
        """By pidfd."""
        self._links: dict[int, _Link] = {}
        """By socket descriptor."""
        self._linked: set[tuple[str, int]] = set()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"failure-detector-{me.rank}", daemon=True)
        self._thread.start()

    def watch(self, members: Iterable[Member]) -> None:
        """Watch these too. Members of this host that have ended are lost when this returns.

        Members of other hosts are watched once their port is known. After ``close`` it does nothing.
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
            # One connection per host: to its member of lowest rank that is not lost.
            there = [member for member in self._of_host(host_id) if member.port]
            there = [member for member in there if member.process not in self._lost]
            first = min(there, key=lambda member: member.rank, default=None)
            if first is not None:
                self._connect_to(first)

    def lost(self) -> tuple[Member, ...]:
        """Lost members, in the order of detection."""
        return tuple(member for member, _ in list(self._lost.values()))

    def check(self, operation: str, step: str = "", waited_s: float = 0.0) -> None:
        """Raise if a member is lost; otherwise cheap.

        Raises:
            MemberLostError: with these facts and the members that are lost.
        """
        if self._lost:
            reasons = dict.fromkeys(reason for _, reason in list(self._lost.values()))
            raise MemberLostError(
                operation, self.me.rank, self.lost(), waited_s, step, reason="; ".join(reasons)
            )

    def close(self) -> None:
        """Stop the thread and close the descriptors. Safe to call twice."""
        with self._lock:  # the thread closes descriptors only with this lock
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        self._thread.join()

    def _watch_process(self, member: Member) -> None:
        try:
            descriptor = os.pidfd_open(member.pid)
        except ProcessLookupError:
            self._record_loss(member, _ENDED)
        except OSError as error:
            if error.errno in _OWN_SHORTAGES:
                raise self._cannot_watch(member, error) from error
            if member.port:  # a kernel without pidfd
                self._connect_to(member)
        else:
            with self._lock:
                if self._closing:
                    os.close(descriptor)
                    return
                self._processes[descriptor] = member
                self._epoll.register(descriptor, select.EPOLLIN)

    def _connect_to(self, member: Member) -> None:
        """Connect, once per process, to a member without a pidfd here."""
        if member.process in self._linked:
            return
        self._linked.add(member.process)
        try:
            link = socket.create_connection((member.address, member.port), timeout=_HEARTBEAT_TIMEOUT_S)
        except (ConnectionRefusedError, ConnectionResetError):
            self._record_loss(member, _ENDED)
            return
        except OSError as error:
            if error.errno in _OWN_SHORTAGES:
                self._linked.discard(member.process)  # it has not been tried
                raise self._cannot_watch(member, error) from error
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
            os.eventfd_write(self._wake, 1)  # the thread starts to send heartbeats

    def _cannot_watch(self, member: Member, error: OSError) -> CommunicatorError:
        detail = f"this process cannot watch it: {error.strerror}. Raise `ulimit -n`"
        return CommunicatorError("connect", self.me.rank, str(member), 0.0, detail)

    def _record_loss(self, member: Member, reason: str) -> None:
        """Record a loss once. If it is a process of this host, send death notices."""
        with self._lock:
            if member.process in self._lost or self._closing:
                return
            self._lost[member.process] = (member, reason)
            if member.host_id == self.me.host_id:
                self._server.announce(self, member.pid)

    def _record_host_loss(self, member: Member, reason: str) -> None:
        for other in self._of_host(member.host_id):
            self._record_loss(other, reason)

    def _of_host(self, host_id: str) -> list[Member]:
        return [member for member in list(self._known.values()) if member.host_id == host_id]

    def _run(self) -> None:
        next_heartbeat_s = 0.0
        while not self._closing:
            # Without connections there is no heartbeat to send: sleep until an event.
            timeout_s = max(0.0, next_heartbeat_s - time.monotonic()) if self._links else None
            for descriptor, _ in self._epoll.poll(timeout_s):
                self._handle(descriptor)
            if self._links and time.monotonic() >= next_heartbeat_s:
                self._send_heartbeat()
                next_heartbeat_s = time.monotonic() + _HEARTBEAT_S
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
        """Read death notices of another host, or the end of its first member."""
        link = self._links[descriptor]
        silence = None
        try:
            received = link.socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:  # the process ended with unread heartbeats
            received = b""
        except OSError as error:  # TCP_USER_TIMEOUT: the whole host is unreachable
            received, silence = b"", f"its host is silent: {error.strerror}"
        # 1. Complete death notices are processes of that host that ended.
        link.received_bytes += received
        whole = len(link.received_bytes) // DEATH_NOTICE.size * DEATH_NOTICE.size
        for (pid,) in DEATH_NOTICE.iter_unpack(link.received_bytes[:whole]):
            other = self._known.get((link.member.host_id, pid))
            if other is not None:
                self._record_loss(other, _ENDED)
        link.received_bytes = link.received_bytes[whole:]
        if received:
            return
        # 2. The connection is closed: its process has ended, or its host is unreachable.
        del self._links[descriptor]
        self._epoll.unregister(descriptor)
        link.socket.close()
        if silence is not None:
            self._record_host_loss(link.member, silence)
        else:
            self._record_loss(link.member, _ENDED)

    def _send_heartbeat(self) -> None:
        """Send a byte on each connection, which the other kernel must acknowledge."""
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # epoll reports a broken connection
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
