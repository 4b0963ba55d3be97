"""The policy server: frontends, batcher and policy, from start to shutdown."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from placement.errors import counted
from rayagi.serving.errors import ListenError
from rayagi.serving.policy_server.batching import FairBatcher, ServerStatistics
from rayagi.serving.policy_server.http_frontend import LOGGER, HttpFrontend
from rayagi.serving.policy_server.served_policy import ServedPolicy
from rayagi.serving.policy_server.socket_frontend import SocketFrontend

DRAIN_S = 5.0
"""Time limit to answer pending requests after SIGTERM."""
IDLE_S = 75.0
"""Keep-alive timeout of HTTP connections; clients reconnect."""
POLL_S = 1.0
"""How often ``--follow`` checks for a newer checkpoint."""
SWITCH_S = 2e-4
"""How long a piece in work may keep Python's lock from the event loop (5 ms by default), up to one call of C."""
FULL_S = 60.0
"""How often it reports that it accepts no connections."""
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors for which asyncio stops to accept connections for a second."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Addresses and limits of the server."""

    host: str = "127.0.0.1"
    port: int | None = None
    """HTTP port; 0: any free one; None: no HTTP."""
    unix: Path | None = None
    token: str | None = None
    max_rows: int = 4096
    threads: int = 1
    follow: bool = False


class PolicyServer:
    """Runs until it is stopped. ``log`` receives messages for the user."""

    def __init__(self, policy: ServedPolicy, settings: ServerSettings, log: Callable[[str], object]) -> None:
        self._policy, self._settings, self._log = policy, settings, log
        self.statistics = ServerStatistics()
        self._expected = policy.expected(settings.max_rows)
        self._batcher = FairBatcher(lambda: policy.current, self._expected, self.statistics)
        self.ready = asyncio.Event()
        """Set when it listens."""
        self.port: int | None = None
        """HTTP port in use."""
        self._stop = asyncio.Event()
        self._reading = asyncio.Lock()
        self._full_at = -FULL_S
        """Monotonic time of the last report that it accepts no connections."""

    def stop(self) -> None:
        """Answer pending requests, then end."""
        self._stop.set()

    async def run(self, *, signals: bool = True) -> None:
        """Serve until ``stop``. With ``signals``, SIGTERM and Ctrl-C stop it, and SIGHUP reloads the checkpoint.

        If SIGINT is ignored, as in a script's background job, it stays ignored.

        Raises:
            ListenError: the socket or port is not available.
        """
        torch.set_num_threads(self._settings.threads)
        sys.setswitchinterval(SWITCH_S)
        # Raise the limit of open files: idle connections must not block others.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._report)
        runner = await self._open_http()
        frontend = await self._open_socket(runner)
        background: set[asyncio.Task[None]] = set()
        ending = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        if signals:
            for number in ending:
                loop.add_signal_handler(number, self.stop)

            def reload() -> None:
                task = loop.create_task(self.reload())
                background.add(task)
                task.add_done_callback(background.discard)

            loop.add_signal_handler(signal.SIGHUP, reload)
        if self._settings.follow:
            background.add(loop.create_task(self._follow()))
        self.ready.set()
        try:
            await self._stop.wait()
        finally:
            for task in background:
                task.cancel()
            # At once: while one waits for slow clients, the other must not accept new requests.
            await asyncio.gather(
                *([] if frontend is None else [frontend.close(DRAIN_S)]),
                *([] if runner is None else [runner.cleanup()]),
            )
            self._batcher.close(DRAIN_S)
            for number in (*ending, signal.SIGHUP) if signals else ():
                loop.remove_signal_handler(number)

    async def reload(self) -> None:
        """Reload the checkpoint in another thread and use it; if it is bad, keep the current one."""
        async with self._reading:
            try:
                saved = await asyncio.to_thread(self._policy.read)
                self._policy.exchange(saved)
            except (
                Exception
            ) as error:  # a network's code raises any; the next checkpoint is followed all the same
                reason = str(error) or type(error).__name__
                self._log(f"kept {self._policy.saved.checkpoint}: {reason}")
            else:
                self._log(f"now {saved.checkpoint} ({counted(saved.env_steps, 'environment step')})")

    async def _follow(self) -> None:
        """Reload when the run names another checkpoint, or writes the same one anew."""
        seen, failure = await asyncio.to_thread(self._state, self._policy.saved.checkpoint), ""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                newest = await asyncio.to_thread(self._policy.newest)
                state = None if newest is None else await asyncio.to_thread(self._state, newest)
            except Exception as error:  # the folder may hold anything; look again later
                reason = str(error) or type(error).__name__
                if reason != failure:
                    self._log(f"cannot look for a newer checkpoint, and will try again: {reason}")
                failure = reason
                continue
            failure = ""
            if state not in (None, seen):
                seen = state
                await self.reload()

    def _state(self, checkpoint: str) -> tuple[str, int]:
        """The checkpoint's name, and when it was written; 0 if it is not there."""
        try:
            return checkpoint, self._policy.written(checkpoint)
        except OSError:
            return checkpoint, 0

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's own errors. It has a traceback for every connection that it cannot accept, thousands in a minute."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _FULL):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._full_at + FULL_S:
            self._full_at = time.monotonic()
            LOGGER.warning(
                "no new connections are accepted: %s; close idle ones, or raise the limit", error.strerror
            )

    async def _open_http(self) -> web.AppRunner | None:
        settings = self._settings
        if settings.port is None:
            return None
        frontend = HttpFrontend(
            self._policy, self._batcher, self.statistics, self._expected, token=settings.token
        )
        runner = web.AppRunner(
            frontend.app,
            access_log=None,
            logger=LOGGER,
            handler_cancellation=True,
            handle_signals=False,
            shutdown_timeout=DRAIN_S / 2,  # it waits twice: for requests, then for those that it cancels
            keepalive_timeout=IDLE_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            await runner.cleanup()
            where = f"{settings.host}:{settings.port}"
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ListenError(
                where, reason, "choose another --port or --host (--port 0 takes any free one)"
            ) from error
        self.port = int(runner.addresses[0][1])
        self._log(f"HTTP at {_url(settings.host, self.port)}")
        return runner

    async def _open_socket(self, runner: web.AppRunner | None) -> SocketFrontend | None:
        settings = self._settings
        if settings.unix is None:
            return None
        frontend = SocketFrontend(settings.unix, self._policy, self._batcher, self.statistics, self._expected)
        try:
            await frontend.open()
        except BaseException:
            if runner is not None:
                await runner.cleanup()
            raise
        self._log(f"local socket at {settings.unix}")
        return frontend


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host name."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
