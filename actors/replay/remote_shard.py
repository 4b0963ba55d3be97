"""A shard that another process serves: its description, its life, and requests to it."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from actors.replay import wire
from actors.replay.errors import ReplayError, ShardLostError
from actors.replay.shard import ERRORS, PROTOCOL, Address


class Request:
    """A request that was sent, and whose answer may be on its way."""

    def __init__(self, shard: RemoteShard, connection: socket.socket) -> None:
        """See ``RemoteShard.start``."""
        self._shard, self._connection = shard, connection

    def result(self) -> Any:
        """Wait for the answer.

        Raises:
            ShardLostError: the shard's process has ended, or does not respond.
            ReplayError, ReplayBusyError: that it answered with.
        """
        return self._shard.finish(self._connection)


class RemoteShard:
    """Client of one ``ReplayShard``. Any thread may use it: each request in flight has a connection of its own.

    Attributes:
        meta: of the store
        host_id, endpoint: where processes of the same host attach to it
        rows: rows that could be selected when it answered last
        is_limited: whether it had a rate limiter then
    """

    def __init__(self, address: str, *, host_id: str, timeout_s: float) -> None:
        """Connect. A shard that does not respond for ``timeout_s`` is lost; ``host_id`` is of this process.

        Raises:
            ReplayError: it is no address, or the shard refuses this client.
            ShardLostError: nobody responds there.
        """
        self.address, self._host_id, self._timeout_s = address, host_id, timeout_s
        self._at = Address.parse(address)
        self.rows, self.is_limited = 0, False
        self._lock = threading.Lock()
        self._idle: deque[socket.socket] = deque()
        self._busy: set[socket.socket] = set()
        self._owner = os.getpid()
        self._reason = ""
        """Why it is lost; empty: it is not."""
        self._control, found = self._connect()
        self.meta: dict[str, Any] = found["meta"]
        self.host_id, self.endpoint, self.pid = found["host_id"], found["endpoint"], int(found["pid"])
        self._control.setblocking(False)

    @property
    def reason(self) -> str:
        """Why it is lost; empty while it is not. The kernel closes its connections when its process ends."""
        if not self._reason:
            try:
                self._control.recv(1, socket.MSG_PEEK)  # the shard sends nothing here: this is its end
            except BlockingIOError:
                return ""
            except OSError:  # gone in another way
                pass
            self.lose("its process has ended")
        return self._reason

    def lose(self, reason: str) -> None:
        """Count it as lost, close the connections, and so end the requests in flight."""
        self._after_fork()
        with self._lock:
            self._reason = self._reason or reason
            idle, busy = [*self._idle, self._control], list(self._busy)
            self._idle.clear()
        for connection in busy:  # their users close them
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for connection in idle:
            connection.close()

    def start(self, call: str, *arguments: Any) -> Request:
        """Send a request; the answer is awaited later.

        Raises:
            ShardLostError: the shard's process has ended, or does not respond.
            ReplayError: an array does not hold numbers.
        """
        parts = wire.encode([call, arguments])  # bad arguments raise before anything is sent
        connection = self._take()
        try:
            wire.send_parts(connection, parts)
        except OSError as error:
            raise self._lost(connection, error) from error
        return Request(self, connection)

    def finish(self, connection: socket.socket) -> Any:
        """See ``Request.result``."""
        try:
            answer = wire.receive(connection)
        except OSError as error:
            raise self._lost(connection, error) from error
        with self._lock:
            self._busy.discard(connection)
            if self._reason:
                connection.close()
            else:
                self._idle.append(connection)
        return self._result(answer)

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self.lose("this client has closed it")

    def _take(self) -> socket.socket:
        self._after_fork()
        with self._lock:
            if self._reason:
                raise ShardLostError(
                    f"the replay shard at {self._at.host}:{self._at.port} is lost: {self._reason}"
                )
            connection = self._idle.pop() if self._idle else None
            if connection is not None:
                self._busy.add(connection)
                return connection
        connection, _ = self._connect()
        with self._lock:
            self._busy.add(connection)
        return connection

    def _after_fork(self) -> None:
        """In a forked child, leave the connections to its parent."""
        if self._owner != os.getpid():
            self._owner, self._idle, self._busy, self._lock = os.getpid(), deque(), set(), threading.Lock()

    def _connect(self) -> tuple[socket.socket, Any]:
        where = f"{self._at.host}:{self._at.port}"
        try:
            connection = socket.create_connection((self._at.host, self._at.port), self._timeout_s)
        except OSError as error:
            self._reason = f"it cannot be reached ({error})"
            raise ShardLostError(f"the replay shard at {where} is lost: {self._reason}") from error
        try:
            wire.prepare(connection)
            wire.send(connection, [self._at.token, PROTOCOL, self._host_id])
            return connection, self._result(wire.receive(connection))
        except ReplayError:
            connection.close()
            raise
        except OSError as error:
            connection.close()
            self._reason = f"it does not respond ({error or type(error).__name__})"
            raise ShardLostError(f"the replay shard at {where} is lost: {self._reason}") from error

    def _result(self, answer: Any) -> Any:
        if "error" in answer:
            raise ERRORS.get(answer["error"], ReplayError)(answer["text"])
        self.rows, self.is_limited = int(answer["rows"]), bool(answer["is_limited"])
        return answer["result"]

    def _lost(self, connection: socket.socket, error: OSError) -> ShardLostError:
        with self._lock:
            self._busy.discard(connection)
        connection.close()
        slow = isinstance(error, TimeoutError)
        self.lose(f"it has not responded for {self._timeout_s:g} s" if slow else "its process has ended")
        return ShardLostError(f"the replay shard at {self._at.host}:{self._at.port} is lost: {self._reason}")
