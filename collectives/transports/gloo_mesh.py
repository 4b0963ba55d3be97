"""Connects Gloo's members to each other, in a way that a death in the middle of it is noticed.

Gloo's own constructor waits for every member's address, and then for its connection, until its time limit; nothing
interrupts it. Here it waits for addresses through a store that looks after the others, and runs in a thread that can
be given up: should a member die between its address and its connection, that thread ends at Gloo's time limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LOOK_S = 0.02


def connected_mesh(
    store: dist.Store, rank: int, world_size: int, options: Any, check: Callable[[], None]
) -> Any:
    """Gloo's process group of these members. ``check`` is called meanwhile, in two threads; what it raises ends this.

    Raises:
        RuntimeError: what Gloo said.
        Exception: what ``check`` raised.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs leave out what its own tests use
    names = _WatchedStore(store, check, options._timeout)
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
    return made[0]


class _WatchedStore(dist.Store):
    """A store in which a wait for a key ends when ``check`` raises."""

    def __init__(self, store: dist.Store, check: Callable[[], None], limit: timedelta) -> None:
        super().__init__()
        self._store, self._check, self._limit = store, check, limit

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a key, and get it."""
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all are set."""
        return self._store.check(keys)

    def wait(self, keys: list[str], limit: timedelta | None = None) -> None:
        """Wait until all are set.

        Raises:
            RuntimeError: they are not within the limit.
        """
        begin, limit_s = time.monotonic(), (limit or self._limit).total_seconds()
        while not self._store.check(keys):
            self._check()
            if time.monotonic() - begin >= limit_s:
                raise RuntimeError(f"no address of a member within {limit_s:.1f} s")
            time.sleep(_LOOK_S)
