"""Descriptors sent between processes: a consumer gets the memory of each producer, even if that producer ends meanwhile."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_BACKLOG = 4096
"""Senders that may wait for a consumer that does not run; the kernel's ``somaxconn`` limits it too."""
_CREDENTIALS = struct.Struct("iii")
"""``struct ucred``: process, user, group."""


class DescriptorInbox:
    """A Unix socket without a file, to which other processes of this user send a descriptor each.

    What was sent waits in the kernel, and so does the memory behind it, whether or not the sender still exists.
    """

    def __init__(self) -> None:
        """Listen under a random name. Raises OSError where this process has too many descriptors."""
        self.token = secrets.randbits(64)
        """Its name, for ``send_descriptor``."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        self._socket.bind(_address(self.token))
        self._socket.listen(_BACKLOG)
        self._connections: list[socket.socket] = []
        """Accepted; their senders have sent nothing so far."""

    def receive(self) -> Iterator[int]:
        """Descriptors that came since the last call; the caller closes them. Does not wait.

        Raises:
            OSError: this process has too many descriptors. What was not received comes with a later call.
        """
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(peer)[1] != os.getuid():  # before it can hold one of our descriptors
                    connection.close()
                    continue
                connection.setblocking(False)
                self._connections.append(connection)
        for connection in list(self._connections):
            with suppress(BlockingIOError):
                received = _receive_from(connection)
                self._connections.remove(connection)
                connection.close()
                yield from received

    def close(self) -> None:
        """Drop what was not received. Safe to call twice."""
        for connection in (self._socket, *self._connections):
            connection.close()
        self._connections = []


def send_descriptor(token: int, descriptor: int) -> None:
    """Send a descriptor to the inbox of this name. Does not wait for its owner.

    Raises:
        OSError: there is no such inbox, or too many senders wait for it.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        connection.connect(_address(token))
        socket.send_fds(connection, [b"\0"], [descriptor])


def _receive_from(connection: socket.socket) -> list[int]:
    """What one sender has sent: a descriptor; or none, if it was killed. It waits until the connection is closed."""
    try:
        _, descriptors, flags, _ = socket.recv_fds(
            connection, 1, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_PEEK
        )
    except ConnectionResetError:
        return []
    if flags & socket.MSG_CTRUNC:  # there was no room for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptors


def _address(token: int) -> str:
    return f"\0rayagi-channel-{token:016x}"
