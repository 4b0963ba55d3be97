"""What a command does when Ray is killed on its machine: one that it has started, or the machine's node of a cluster.

Ray itself waits a minute for its server, then ends the process with a line of its own, and without its raylet it ends the
process soon: no exception reaches Python.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

Handler = Callable[["LocalRayLostError"], None]

_handlers: list[Handler] = []


class LocalRayLostError(RuntimeError):
    """A process of Ray on this machine ended while it was in use."""

    def __init__(self, process: str, pid: int, logs: str, end_others: Callable[[], None]) -> None:
        super().__init__(process, pid, logs)
        self.process, self.pid, self.logs = process, pid, logs
        self.end_others = end_others
        """Ends other processes of a Ray that was started here, without their help. A handler calls it last, as Ray may then
        end this process."""

    def __str__(self) -> str:
        return (
            f"Ray's {self.process} on this machine (process {self.pid}) has ended while this command used it: it was "
            f"killed, as by `ray stop` or for lack of memory, or failed; see Ray's logs in {self.logs}"
        )


@contextmanager
def when_local_ray_is_lost(handler: Handler) -> Iterator[None]:
    """Call ``handler`` in another thread if that happens in the block, after those of inner blocks."""
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)


class LocalRayWatch:
    """Watches processes of Ray on this machine until it is stopped."""

    def __init__(self, processes: Mapping[str, int], logs: str, end_others: Callable[[], None]) -> None:
        """Start the thread.

        Args:
            processes: id by name
            logs: Ray's folder of logs
            end_others: as of ``LocalRayLostError``
        """
        self._logs, self._end_others = logs, end_others
        self._descriptors: dict[int, tuple[str, int]] = {}
        with suppress(OSError):  # a kernel without pidfd
            for name, pid in processes.items():
                self._descriptors[os.pidfd_open(pid)] = name, pid
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="local Ray watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; before Ray is shut down."""
        os.close(self._stop)
        self._thread.join()

    def _watch(self) -> None:
        ready, _, _ = select.select([self._wake, *self._descriptors], [], [])
        for descriptor in (self._wake, *self._descriptors):
            os.close(descriptor)
        if self._wake in ready or not _handlers:
            return
        error = LocalRayLostError(*self._descriptors[ready[0]], self._logs, self._end_others)
        for handler in reversed(_handlers):
            handler(error)
