"""Connects Gloo's members to each other, and detects the loss of a member meanwhile.

Gloo's constructor waits for every member's address, then for its connection, and cannot be interrupted. Here it runs in a
thread, and gets the addresses through a store that calls ``check`` while it waits. When all addresses are published, the
connections get a short time limit: if a member is lost before it connects, the thread ends at that limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL_S = 0.02
_CONNECT_S = 1.0
"""For each of Gloo's five attempts: five seconds in all. Connecting takes milliseconds unless a member is lost."""


def connected_mesh(
    store: dist.Store, rank: int, world_size: int, options: Any, check: Callable[[], None]
) -> Any:
    """Gloo's process group of these members. ``check`` is called meanwhile, in two threads; its exceptions end the wait.

    Raises:
        RuntimeError: Gloo failed.
        Exception: raised by ``check``.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what its own tests use
    limit: timedelta = options._timeout
    names = _WatchedStore(store, world_size, check, limit)
    options._timeout = min(limit, timedelta(seconds=_CONNECT_S))
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(gloo(names, rank, world_size, options))
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, name="gloo-connecting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if thread.is_alive():
            check()
    if isinstance(made[0], Exception):
        raise made[0]
    made[0].set_timeout(limit)
    return made[0]


class _WatchedStore(dist.Store):
    """A store whose waits end when ``check`` raises."""

    def __init__(
        self, store: dist.Store, world_size: int, check: Callable[[], None], limit: timedelta
    ) -> None:
        super().__init__()
        self._store, self._world_size, self._check, self._limit = store, world_size, check, limit
        self._num_set = 0

    def set(self, key: str, value: Any) -> None:
        """Set a key, and wait until all members have set as many keys.

        Raises:
            RuntimeError: they have not within the limit.
        """
        self._store.set(key, value)
        self._num_set += 1
        count = f"members that have set {self._num_set}"
        self._store.add(count, 1)
        self._until(lambda: self._store.add(count, 0) >= self._world_size)

    def get(self, key: str) -> bytes:
        """Wait for a key, and get it."""
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all are set."""
        return self._store.check(keys)

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait until all are set, up to this store's limit: Gloo's limit is for connecting only.

        Raises:
            RuntimeError: they were not set within the limit.
        """
        self._until(lambda: self._store.check(keys))

    def _until(self, ready: Callable[[], bool]) -> None:
        begin, limit_s = time.monotonic(), self._limit.total_seconds()
        while not ready():
            self._check()
            if time.monotonic() - begin >= limit_s:
                raise RuntimeError(f"no address of a member within {limit_s:.1f} s")
            time.sleep(_POLL_S)
