"""Connects Gloo's members to each other, in a way that a death in the middle of it is noticed.

Gloo's own constructor waits for every member's address, and then for its connection, until its time limit; nothing
interrupts it. Here it waits for addresses through a store that looks after the others, and goes on when all have said
theirs: what is left, connecting, needs nobody's attention and gets a short time limit. It runs in a thread that can be
given up: should a member die between its address and its connection, that thread ends at that limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LOOK_S = 0.02
_CONNECT_S = 1.0
"""For each of Gloo's five attempts: five seconds in all, for what takes milliseconds unless a member is gone."""


def connected_mesh(
    store: dist.Store, rank: int, world_size: int, options: Any, check: Callable[[], None]
) -> Any:
    """Gloo's process group of these members. ``check`` is called meanwhile, in two threads; what it raises ends this.

    Raises:
        RuntimeError: what Gloo said.
        Exception: what ``check`` raised.
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
        thread.join(_LOOK_S)
        if thread.is_alive():
            check()
    if isinstance(made[0], Exception):
        raise made[0]
    made[0].set_timeout(limit)
    return made[0]


class _WatchedStore(dist.Store):
    """A store in which a wait for the others ends when ``check`` raises."""

    def __init__(
        self, store: dist.Store, world_size: int, check: Callable[[], None], limit: timedelta
    ) -> None:
        super().__init__()
        self._store, self._world_size, self._check, self._limit = store, world_size, check, limit
        self._num_set = 0

    def set(self, key: str, value: Any) -> None:
        """Set a key, and wait until all members have set as many.

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
        """Wait until all are set. Gloo's limit is that of connecting; others may take longer to come.

        Raises:
            RuntimeError: they are not within this store's own.
        """
        self._until(lambda: self._store.check(keys))

    def _until(self, ready: Callable[[], bool]) -> None:
        begin, limit_s = time.monotonic(), self._limit.total_seconds()
        while not ready():
            self._check()
            if time.monotonic() - begin >= limit_s:
                raise RuntimeError(f"no address of a member within {limit_s:.1f} s")
            time.sleep(_LOOK_S)
