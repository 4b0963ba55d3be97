"""Notices when processes of this host end, through descriptors (pidfd): an id that is used again deceives nobody."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable


class ProcessWatcher:
    """Watches processes until it is closed; what has ended stays ended."""

    def __init__(self, pids: Iterable[int] = ()) -> None:
        self._poll = select.poll()
        self._pids: dict[int, int] = {}
        self._ended: set[int] = set()
        for pid in pids:
            self.watch(pid)

    def watch(self, pid: int) -> None:
        """Watch this one too, from now on."""
        if pid in self._pids.values() and pid not in self.ended():
            return
        self._forget(pid)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended.add(pid)
        except OSError:  # a kernel without such descriptors: time limits alone end a wait
            return
        else:
            self._pids[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> set[int]:
        """Ids of those that have ended."""
        pids = self._pids
        return self._ended | {pids[found] for found, _ in self._poll.poll(0) if found in pids}

    def watch_only(self, pids: Iterable[int]) -> None:
        """Watch no others any longer."""
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
