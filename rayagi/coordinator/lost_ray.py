"""What a program does when Ray is killed under it: one that it has started, the machine's node of a cluster, or its head.

Ray itself waits a minute for its server, then ends the process with a line of its own, and without its raylet it ends the
process soon: no exception reaches Python. A command ends itself before (``when_ray_is_lost``); in other programs the call
that uses Ray raises (``rayagi.coordinator.cluster.named_loss``).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Handler = Callable[["RayLostError"], None]

_handlers: list[Handler] = []

_HEAD_CHECK_S = 2.0
"""Between two connections to a cluster's head, and for one of them."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_RAYS_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable: after how many seconds without the server Ray ends a process. Raised where a head restarts."""
_RAYS_LIMIT_S = 60.0
_PART_OF_LIMIT = 0.7
"""Ray begins to count when it calls the server next, or at its next check: the end has to come before Ray's."""


class RayLostError(RuntimeError):
    """A process of Ray that this one needs has ended."""

    def end_others(self) -> None:
        """End other processes of a Ray that was started here, without their help. A handler calls it last, as Ray may then
        end this process.
        """


class LocalRayLostError(RayLostError):
    """A process of Ray on this machine ended while it was in use."""

    def __init__(
        self, process: str, pid: int, logs: str, end_others: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(process, pid, logs)
        self.process, self.pid, self.logs = process, pid, logs
        self._end_others = end_others

    def end_others(self) -> None:
        """As of the base class."""
        self._end_others()

    def __str__(self) -> str:
        return (
            f"Ray's {self.process} on this machine (process {self.pid}) has ended while this program used it: it was "
            f"killed, as by `ray stop` or for lack of memory, or failed; see Ray's logs in {self.logs}"
        )


class _SilentAddressError(RayLostError):
    """A process of Ray answers no more at its address."""

    def __init__(self, address: str, waited_s: float) -> None:
        super().__init__(address, waited_s)
        self.address, self.waited_s = address, waited_s


class HeadLostError(_SilentAddressError):
    """The head of a cluster, where Ray's server runs, is gone."""

    def __str__(self) -> str:
        return (
            f"the head of the Ray cluster at {self.address} has accepted no connection for {self.waited_s:.0f} s while this "
            "program used it: it was stopped or killed, or cannot be reached. Start the cluster again"
        )


class RayletSilentError(_SilentAddressError):
    """The raylet of this machine's node of a cluster does not answer."""

    def __str__(self) -> str:
        return (
            f"Ray's raylet on this machine ({self.address}) has not answered for {self.waited_s:.0f} s while this program "
            "left the cluster: it is stopped or hangs. Start this node of the cluster again"
        )


class NotEndedError(RayLostError):
    """A command did not end after a signal."""

    def __init__(self, reason: str, waited_s: float, end_others: Callable[[], None] = lambda: None) -> None:
        super().__init__(reason, waited_s)
        self.reason, self.waited_s = reason, waited_s
        self._end_others = end_others

    def end_others(self) -> None:
        """As of the base class."""
        self._end_others()

    def __str__(self) -> str:
        return f"stopped: {self.reason}, and the command did not end within {self.waited_s:.0f} s"


@contextmanager
def when_ray_is_lost(handler: Handler) -> Iterator[None]:
    """Call ``handler`` in another thread if that happens in the block, after those of inner blocks."""
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)


def tell_lost(error: RayLostError) -> RayLostError | None:
    """Call the handlers. Returns the error if there are none: it is for who uses Ray next."""
    for handler in reversed(_handlers):
        handler(error)
    return None if _handlers else error


class LocalRayWatch:
    """Watches processes of Ray on this machine until it is stopped."""

    lost: RayLostError | None = None
    """What has happened, if no handler ends this process."""

    def __init__(self, processes: Mapping[str, int], logs: str, end_others: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            processes: id by name
            logs: Ray's folder of logs
            end_others: as of ``RayLostError``
        """
        self._logs, self._end_others = logs, end_others
        self._descriptors: dict[int, tuple[str, int]] = {}
        self._ended: tuple[str, int] | None = None
        for name, pid in processes.items():
            try:
                self._descriptors[os.pidfd_open(pid)] = name, pid
            except ProcessLookupError:  # it has ended already
                self._ended = name, pid
            except OSError:  # a kernel without pidfd
                break
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="local Ray watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; before Ray is shut down."""
        os.close(self._stop)
        self._thread.join()

    def wait(self, limit_s: float) -> None:
        """Wait until a process has ended and the handlers were called, or for so long."""
        self._thread.join(limit_s)

    def _watch(self) -> None:
        if self._ended is None:
            ready, _, _ = select.select([self._wake, *self._descriptors], [], [])
            self._ended = self._descriptors.get(ready[0])  # None of _wake, the first
        for descriptor in (self._wake, *self._descriptors):
            os.close(descriptor)
        if self._ended is not None:
            self.lost = tell_lost(LocalRayLostError(*self._ended, self._logs, self._end_others))


class HeadWatch:
    """Watches the head of a cluster until it is stopped: whether Ray's server there accepts connections.

    Ray waits for one that is restarted. Where it does not come back, this tells the handlers before Ray ends the process.
    """

    lost: RayLostError | None = None
    """As of ``LocalRayWatch``."""

    def __init__(self, host: str, port: int) -> None:
        """Start the thread."""
        self._host, self._port = host, port
        self._limit_s = _PART_OF_LIMIT * float(os.environ.get(_RAYS_LIMIT) or _RAYS_LIMIT_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="Ray head watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; before Ray is shut down."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        failing_since_s: float | None = None
        while not self._stopped.wait(_HEAD_CHECK_S):
            asked_s = time.monotonic()
            failing_since_s = (failing_since_s or asked_s) if self._is_gone() else None
            if failing_since_s is not None and asked_s - failing_since_s >= self._limit_s:
                self.lost = tell_lost(HeadLostError(f"{self._host}:{self._port}", asked_s - failing_since_s))
                return

    def _is_gone(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), _HEAD_CHECK_S).close()
        except OSError as error:
            # What this process or its host lacks, descriptors or names, says nothing of the head.
            return isinstance(error, ConnectionError | TimeoutError) or error.errno in _UNREACHABLE
        return False
