"""Who of the other members is gone: noticed within 2 s, whatever they and this process are doing.

A thread sleeps until the kernel has news. Of a member of this host that is the end of its process, by a descriptor of
the process. Of another host that is the end of a TCP connection to the group's first member there: it closes when
that process ends, and when the host falls silent for longer than TCP_USER_TIMEOUT; and that first member says on it
which others of its host it sees ending. The only work in between is a byte on each such connection, twice a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from collectives.errors import CommunicatorError, MemberLostError
from collectives.rendezvous import Member

_BEAT_S = 0.5
_SILENCE_S = 1.2
"""After which a host that acknowledges nothing is gone; with a beat before, 1.7 s."""
_NEWS = struct.Struct("<q")
"""What a host's first member says: the process id of one there that ended, or _GOODBYE."""
_GOODBYE = 0
_ENDED = "its process has ended"
_BROKEN = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP

OnLost = Callable[[tuple[Member, ...]], None]


@dataclass(slots=True)
class _Link:
    """A connection to a member that cannot be watched as a process."""

    socket: socket.socket
    member: Member
    heard: bytes = b""
    """Of news that has not arrived in full."""


class Liveness:
    """Watches the members that it was told of until it is closed.

    A loss is final. It does not end waits by itself: they call ``check`` when what they wait for has not come, or are
    woken by ``on_lost``. A member may also leave in order, by ``close``: that is no loss. A member of another host that
    cannot be connected to any more is none either, since it may have left; but ``check`` does not let it pass.
    """

    def __init__(self, me: Member, on_lost: OnLost | None = None) -> None:
        """Begin to listen at ``me.address``.

        Args:
            me: this process
            on_lost: called with who was just lost, on the watching thread or by ``watch``; must neither block nor raise

        Raises:
            OSError: the address is not one of this host.
        """
        family = socket.AF_INET6 if ":" in me.address else socket.AF_INET
        self._listener = socket.create_server((me.address, 0), family=family, backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self.me = replace(me, port=self._listener.getsockname()[1])
        """This member, as the others need to know it."""
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], Member] = {}
        self._lost: dict[tuple[str, int], tuple[Member, str]] = {}
        self._processes: dict[int, Member] = {}
        self._refused: list[Member] = []
        self._links: dict[int, _Link] = {}
        self._linked: set[tuple[str, int]] = set()
        self._followers: dict[int, socket.socket] = {}
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=f"liveness-{me.rank}", daemon=True)
        self._thread.start()

    def watch(self, members: Iterable[Member]) -> None:
        """Watch these too. Those that are gone already are lost when this returns.

        Members of other hosts are watched once their port is known.
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
            there = [member for member in self._known.values() if member.host_id == host_id and member.port]
            first = min(there, key=lambda member: member.rank, default=None)
            if first is not None:
                self._link(first)

    def lost(self) -> tuple[Member, ...]:
        """Who is gone, in the order in which that was noticed."""
        return tuple(member for member, _ in self._lost.values())

    def check(self, operation: str, step: str = "", waited_s: float = 0.0) -> None:
        """Raise if anyone is gone. Costs nothing otherwise.

        Raises:
            MemberLostError: with these facts.
            CommunicatorError: none is known to be gone, but one left before it was connected to.
        """
        if self._lost:
            reasons = dict.fromkeys(reason for _, reason in list(self._lost.values()))
            raise MemberLostError(
                operation, self.me.rank, self.lost(), waited_s, step, reason="; ".join(reasons)
            )
        if self._refused:
            raise CommunicatorError(
                operation,
                self.me.rank,
                ", ".join(map(str, self._refused)),
                waited_s,
                "it has left the group, or its process has ended",
                step,
            )

    def close(self) -> None:
        """Tell members of other hosts goodbye, and free thread and descriptors. Safe to call twice, and in ``on_lost``."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch_process(self, member: Member) -> None:
        try:
            descriptor = os.pidfd_open(member.pid)
        except ProcessLookupError:
            self._lose(member, _ENDED)
        except OSError:  # a kernel without such descriptors
            self._link(member)
        else:
            self._processes[descriptor] = member
            self._epoll.register(descriptor, select.EPOLLIN)

    def _link(self, member: Member) -> None:
        """Connect, once, to a member that cannot be watched as a process."""
        if member.process in self._linked:
            return
        self._linked.add(member.process)
        try:
            link = socket.create_connection((member.address, member.port), timeout=_SILENCE_S)
        except ConnectionRefusedError:
            self._refused.append(member)
            return
        except OSError as error:
            self._lose(member, f"no connection to {member.address} port {member.port}: {error}")
            return
        link.setblocking(False)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _SILENCE_S))
        self._links[link.fileno()] = _Link(link, member)
        self._epoll.register(link, select.EPOLLIN | select.EPOLLRDHUP)
        os.eventfd_write(self._wake, 1)  # from now on there is a beat to keep

    def _lose(self, member: Member, reason: str) -> None:
        """Note a loss, once; tell members of other hosts if it is ours to tell, and who waits here."""
        with self._lock:
            if member.process in self._lost or self._closing:
                return
            self._lost[member.process] = (member, reason)
            if member.host_id == self.me.host_id:
                for follower in self._followers.values():
                    _say(follower, member.pid)
        if self._on_lost is not None:
            self._on_lost((member,))

    def _run(self) -> None:
        next_beat = 0.0
        while not self._closing:
            timeout_s = max(0.0, next_beat - time.monotonic()) if self._links else None
            for descriptor, event in self._epoll.poll(timeout_s):
                self._handle(descriptor, event)
            if self._links and time.monotonic() >= next_beat:
                self._beat()
                next_beat = time.monotonic() + _BEAT_S
        self._release()

    def _handle(self, descriptor: int, event: int) -> None:
        if descriptor == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        elif descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._processes:
            member = self._processes.pop(descriptor)
            self._epoll.unregister(descriptor)
            os.close(descriptor)
            self._lose(member, _ENDED)
        elif descriptor in self._links:
            self._hear(descriptor)
        elif event & _BROKEN:
            with self._lock:
                follower = self._followers.pop(descriptor)
            self._epoll.unregister(descriptor)
            follower.close()

    def _accept(self) -> None:
        """A member of another host wants to hear of this one's."""
        try:
            follower, _ = self._listener.accept()
        except OSError:  # it left before it was received
            return
        follower.setblocking(False)
        with self._lock:
            self._followers[follower.fileno()] = follower
            for member, _ in self._lost.values():
                if member.host_id == self.me.host_id:
                    _say(follower, member.pid)
        # Its beats are not worth waking up for: they are read with the next own one.
        self._epoll.register(follower, select.EPOLLRDHUP)

    def _hear(self, descriptor: int) -> None:
        """News of another host, or the end of its first member."""
        link = self._links[descriptor]
        reason = _ENDED
        try:
            received = link.socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it ended with unread beats
            received = b""
        except OSError as error:
            received, reason = b"", f"its host is silent: {error.strerror}"
        link.heard += received
        whole = len(link.heard) // _NEWS.size * _NEWS.size
        pids = [pid for (pid,) in _NEWS.iter_unpack(link.heard[:whole])]
        link.heard = link.heard[whole:]
        if _GOODBYE in pids or not received:
            del self._links[descriptor]
            self._epoll.unregister(descriptor)
            link.socket.close()
        for pid in pids:
            other = self._known.get((link.member.host_id, pid))
            if other is not None:
                self._lose(other, _ENDED)
        if not received:
            self._lose(link.member, reason)

    def _beat(self) -> None:
        """Give the kernel something to be acknowledged, and make room for what others gave it."""
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):  # a broken link is heard of
                link.socket.send(b"\0")
        for follower in list(self._followers.values()):
            with contextlib.suppress(OSError):
                follower.recv(4096)

    def _release(self) -> None:
        with self._lock:
            for follower in self._followers.values():
                _say(follower, _GOODBYE)
        for descriptor in self._processes:
            os.close(descriptor)
        links = [link.socket for link in self._links.values()]
        for connection in (*self._followers.values(), *links, self._listener):
            connection.close()
        self._epoll.close()
        os.close(self._wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _say(follower: socket.socket, news: int) -> None:
    with contextlib.suppress(OSError):  # it is leaving, or has not listened for thousands of news
        follower.send(_NEWS.pack(news))
