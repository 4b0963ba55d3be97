"""Detects the end of processes of this host by pidfd, which is safe against reused process ids."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterable


class ProcessWatcher:
    """Watches processes until it is closed. An ended process stays ended, even if its id is reused."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()
        for pid in pids:
            self.watch(pid)

    def watch(self, pid: int) -> None:
        """Watch this process too."""
        if pid in self._pids.values() and pid not in self.ended():
            return
        self._forget(pid)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(pid)
        except OSError as error:
            # Kernels without pidfd: only time limits end a wait.
            if error.errno in (errno.EINVAL, errno.ENOENT):
                self._ended.add(pid)  # its id is now a thread's, or still that of its process group
        else:
            self._pids[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> set[int]:
        """Ids of watched processes that have ended."""
        pids = self._pids
        return self._ended | {pids[found] for found, _ in self._poll.poll(0) if found in pids}

    def watch_only(self, pids: Iterable[int]) -> None:
        """Stop watching all others."""
        kept = set(pids)
        for pid in {*self._pids.values(), *self._ended} - kept:
            self._forget(pid)

    def close(self) -> None:
        """Close the descriptors. Safe to call twice."""
        self._poll = select.poll()
        while self._pids:
            os.close(self._pids.popitem()[0])

    def _forget(self, pid: int) -> None:
        self._ended.discard(pid)
        for descriptor, known in list(self._pids.items()):
            if known == pid:
                self._poll.unregister(descriptor)
                del self._pids[descriptor]
                os.close(descriptor)


def has_ended(pid: int) -> bool:
    """Whether a process has ended."""
    processes = ProcessWatcher([pid])
    try:
        return bool(processes.ended())
    finally:
        processes.close()
