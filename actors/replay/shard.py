"""A shard of a table: a store, and a server that lets processes of other hosts use it."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from actors.replay import wire
from actors.replay.calls import CALLS
from actors.replay.errors import RateLimitedError, ReplayBusyError, ReplayError, ReplayTimeoutError
from actors.replay.store import ReplayStore
from collectives.closing import ClosesOnExit
from collectives.rendezvous import host_identity

_logger = logging.getLogger(__name__)
PROTOCOL = 3
"""Version of the messages. Increment it with every change of ``wire`` or ``calls``."""
_HELLO_S, _HELLO_BYTES = 10.0, 1024
"""Of a peer that has not said the token."""
ERRORS = {
    error.__name__: error for error in (ReplayError, RateLimitedError, ReplayTimeoutError, ReplayBusyError)
}
"""Errors that are raised again where the request came from; of relatives, the more precise first."""


class Address(NamedTuple):
    """Where a shard's server listens, and the token that a client must know."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of ``str``. Raises ReplayError where it is no address."""
        parts = urlsplit(text)
        try:
            found = cls(parts.hostname or "", parts.port or 0, parts.path.removeprefix("/"))
        except ValueError:
            found = cls("", 0, "")
        if parts.scheme != "replay" or not all(found):
            raise ReplayError(f"{text!r} is no address of a replay shard: expected replay://HOST:PORT/TOKEN")
        return found

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"replay://{host}:{self.port}/{self.token}"


class ReplayShard(ClosesOnExit):
    """Serves a store of this process to others. Processes of this host attach to the store itself, as the server tells them.

    Requests of one connection are answered in turn, those of several in parallel; copies release the GIL. The server holds
    nothing of a client, so a client that is killed leaves at most a row that nobody sees.
    """

    def __init__(
        self, store: ReplayStore, *, host: str = "127.0.0.1", port: int = 0, host_id: str | None = None
    ) -> None:
        """Start to listen.

        Args:
            store: belongs to the shard, which closes it
            host: address of this host that the others reach
            port: 0: a free one
            host_id: of processes that attach to the store; None: ``host_identity()``

        Raises:
            ReplayError: the address cannot be listened on.
        """
        self.store, self._host_id = store, host_id or host_identity()
        self.reads: Counter[str] = Counter()
        """Rows read through the server, by identity of the reader's host."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            raise ReplayError(f"a replay shard cannot listen on {host}:{port} ({error.strerror})") from error
        self._address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="replay-shard", daemon=True).start()

    @property
    def address(self) -> str:
        """``replay://HOST:PORT/TOKEN``. Who has it may read and write the rows."""
        return str(self._address)

    def close(self) -> None:
        """Disconnect all clients, for which the shard is lost then, and close the store. Safe to call twice."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            connections = list(self._connections)
        if was_closed:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes ``accept``
        self._listener.close()
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.store.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or no descriptor is free, and a client connects again
                if self._closed:
                    return
                threading.Event().wait(0.1)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            server = threading.Thread(
                target=self._serve, args=(connection,), name="replay-shard-client", daemon=True
            )
            try:
                server.start()
            except RuntimeError as error:  # as many threads as the system allows: the client connects again
                _logger.warning("a client of the replay shard is not served: %s", error)
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client's requests until it disconnects."""
        try:
            with connection, suppress(OSError):
                wire.prepare(connection)
                reader = self._greet(connection)
                while reader is not None:
                    call, arguments = wire.receive(connection)
                    wire.send(connection, self._answer(reader, call, arguments))
        except (wire.WireError, ValueError, TypeError) as error:
            _logger.warning("a client of the replay shard sent no request: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _greet(self, connection: socket.socket) -> str | None:
        """Check the token, and describe the store. Returns the client's host; None: it is refused."""
        connection.settimeout(_HELLO_S)
        token, protocol, host_id = wire.receive(connection, _HELLO_BYTES, 0)
        if not hmac.compare_digest(str(token).encode(), self._address.token.encode()):
            wire.send(connection, {"error": "ReplayError", "text": "the token of the address is wrong"})
            return None
        if protocol != PROTOCOL:
            text = f"the shard speaks protocol {PROTOCOL}, the client {protocol}: use one version of rayagi"
            wire.send(connection, {"error": "ReplayError", "text": text})
            return None
        connection.settimeout(None)
        description = {
            "host_id": self._host_id,
            "pid": os.getpid(),
            "endpoint": self.store.endpoint,
            "meta": self.store.meta,
        }
        wire.send(connection, self._with_state(description))
        return str(host_id)

    def _answer(self, reader: str, call: str, arguments: list[Any]) -> dict[str, Any]:
        """Result or error of one request; a result with the rows that can be selected now, and whether there is a limit."""
        try:
            if call == "reads":
                return self._with_state(dict(self.reads))
            if call not in CALLS:
                raise ReplayError(f"a replay shard has no call {call!r}")
            result = CALLS[call](self.store, *arguments)
        except Exception as error:
            name = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
            if not name:
                _logger.exception("%s failed in a replay shard", call)
            return {"error": name or "ReplayError", "text": f"{'' if name else f'{call}: '}{error}"}
        if call == "gather":
            self.reads[reader] += len(arguments[0])
        return self._with_state(result)

    def _with_state(self, result: Any) -> dict[str, Any]:
        return {"result": result, "rows": len(self.store), "is_limited": self.store.is_limited}
