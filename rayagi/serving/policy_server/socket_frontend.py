"""Socket frontend of the policy server: frames over a Unix socket that only this user may open."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path

from rayagi.serving.errors import ListenError
from rayagi.serving.policy_server.batching import FairBatcher, ServerStatistics
from rayagi.serving.policy_server.frames import HEADER, FrameError, Kind, frame, header
from rayagi.serving.policy_server.requests import Expected, RequestError
from rayagi.serving.policy_server.served_policy import ServedPolicy

_PIPELINED = 64
"""Most unanswered requests of a client; then the server stops reading from it."""
_PIPELINED_BYTES = 2**20
"""Most bytes of a client's unanswered requests, if there are several; then the server stops reading from it."""
_HIGH_WATER_BYTES = 2**20
"""Most unread answers of a client; then the server stops reading from it."""


class SocketFrontend:
    """Listens at a path. A slow or dead client does not affect the others."""

    def __init__(
        self,
        path: Path,
        policy: ServedPolicy,
        batcher: FairBatcher,
        statistics: ServerStatistics,
        expected: Expected,
    ) -> None:
        self._path, self._policy, self._batcher, self._statistics = path, policy, batcher, statistics
        self._expected = expected
        self._server: asyncio.Server | None = None
        self._inode: tuple[int, int] | None = None
        """Device and number of the socket's file."""
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._pending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start to listen.

        Raises:
            ListenError: another server listens there, or the socket cannot be created.
        """
        _refuse_taken(self._path)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._enter, str(self._path))
            self._inode = _inode(self._path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ListenError(str(self._path), reason, "choose another --unix path") from error
        finally:
            os.umask(before)

    async def close(self, timeout_s: float) -> None:
        """Accept no more clients, answer pending requests, and disconnect all."""
        if self._server is not None:
            self._server.close()
            # At once, and only its own: from now on another server may take the path.
            if self._inode == _inode(self._path):
                self._path.unlink(missing_ok=True)
        clients = dict(self._clients)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if self._pending:
                    await asyncio.wait(self._pending)
                for writer in clients.values():
                    writer.close()  # flushes its buffer first
                if clients:
                    await asyncio.wait(clients)
        for task, writer in clients.items():
            if not task.done():
                writer.transport.abort()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        requests: dict[asyncio.Task[None], int] = {}
        try:
            writer.transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
            info = {**self._policy.info(), "max_rows": self._expected.max_rows}
            writer.write(frame(Kind.HELLO, 0, json.dumps(info).encode()))
            await self._attend(reader, writer, requests)
        except ConnectionError:
            pass  # the client disconnected
        except asyncio.IncompleteReadError:
            # It sends no more, and may still read: `shutdown(SHUT_WR)` after the last request.
            while requests and not _is_gone(writer):
                await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        except FrameError as error:
            self._statistics.refused += 1
            writer.write(frame(Kind.ERROR, 0, str(error).encode()))
        finally:
            for request in requests:
                request.cancel()
            writer.close()
            try:
                with suppress(ConnectionError):
                    await writer.wait_closed()
            finally:
                del self._clients[task]  # not before its answers are sent: close() waits for them

    async def _attend(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        requests: dict[asyncio.Task[None], int],
    ) -> None:
        """Read requests; ``requests`` has those that are not answered, and their bytes."""
        while True:
            first_byte = await reader.readexactly(1)
            began = time.perf_counter()
            kind, request, body_bytes = header(first_byte + await reader.readexactly(HEADER.size - 1))
            limit = 4 * self._expected.row_dim * self._expected.max_rows
            if kind != Kind.OBSERVE or body_bytes > limit:
                raise FrameError(
                    f"got {kind.name} of {body_bytes} bytes; expected OBSERVE of at most {limit} bytes"
                )
            while len(requests) >= _PIPELINED or (
                requests and sum(requests.values()) + body_bytes > _PIPELINED_BYTES
            ):
                await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            body = await reader.readexactly(body_bytes)
            task = asyncio.create_task(self._answer(request, body, began, writer))
            self._pending.add(task)
            requests[task] = body_bytes
            task.add_done_callback(self._pending.discard)
            task.add_done_callback(requests.__delitem__)
            await writer.drain()  # stop reading from a client that does not read

    async def _answer(self, request: int, body: bytes, began: float, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._batcher.answer(writer, body, "raw", began)
        except RequestError as error:
            self._statistics.refused += 1
            writer.write(frame(Kind.ERROR, request, error.reason.encode()))
        else:
            writer.write(frame(Kind.ACTIONS, request, answer.body))


def _is_gone(writer: asyncio.StreamWriter) -> bool:
    """Whether the client can read no more answers."""
    if writer.is_closing():
        return True
    poll = select.poll()
    # Without POLLIN: POLLHUP is reported in any case, and means that both directions are closed.
    poll.register(writer.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))


def _inode(path: Path) -> tuple[int, int] | None:
    """Device and number of a file; None if there is none."""
    with suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None


def _refuse_taken(path: Path) -> None:
    """Remove a socket without a listener.

    Raises:
        ListenError: the path exists and is in use, is no socket, or is another user's.
    """
    hint = "choose another --unix path"
    try:
        kind = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(kind):
        raise ListenError(str(path), "the path exists and is no socket", hint)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:  # nobody listens: of a killed server
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ListenError(
                    str(path), f"a socket of a killed server: {error.strerror}", hint
                ) from error
        except OSError as error:  # such as another user's, who may well listen
            raise ListenError(str(path), f"a socket is there already: {error.strerror}", hint) from error
        else:
            raise ListenError(str(path), "another server listens there", f"end it, or {hint}")
