"""Environments with threads of their own belong to the process that made them."""

from __future__ import annotations

import os

from rayagi.envs.errors import ForkedEnvError


class ThreadOwner:
    """The process that has the threads of an environment. Anybody else would wait for them without end."""

    def __init__(self, num_threads: int) -> None:
        self._pid = os.getpid() if num_threads > 1 else None

    def check(self) -> None:
        """Raise ForkedEnvError if this is another process; never with one thread, which is the caller's."""
        if self._pid is not None and self._pid != os.getpid():
            raise ForkedEnvError(self._pid)
