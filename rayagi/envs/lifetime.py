"""How long environments may be used, and by whom.

They may be closed at any time: by another thread, or by a signal handler while they step. Threads that step them belong to
the process that made them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Concatenate, ParamSpec, TypeVar

from actors.protocols import EnvInfo
from rayagi.envs.errors import ClosedEnvError, ForkedEnvError

Env = TypeVar("Env", bound="ClosableEnv")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class ClosableEnv(ABC):
    """Releases what it has at the end of the calls in progress, and refuses later ones.

    There is no lock: a signal handler runs in the thread that steps, where it would wait for itself. Adding to a set,
    removing from it and ``list.pop`` are atomic. A call first enters ``_calls`` and then reads ``_is_closed``; ``close``
    first writes ``_is_closed`` and then reads ``_calls``. Either the call is refused, or ``close`` leaves the release to it.
    """

    info: EnvInfo

    def __init__(self) -> None:
        self._calls: set[tuple[int, object]] = set()
        """Calls in progress, each with its thread."""
        self._is_closed = False
        self._unreleased = [True]
        """Whoever takes its one element releases."""

    def close(self) -> None:
        """Release threads and simulators: now, or at the end of the call in progress. Safe to call twice."""
        self._is_closed = True
        self._release_unused()

    def _release_unused(self) -> None:
        if self._calls:
            return
        try:
            self._unreleased.pop()
        except IndexError:  # somebody else releases, or has
            return
        self._release()

    def _is_nested(self, call: tuple[int, object]) -> bool:
        """Whether the thread of a call makes it in another one, which goes on."""
        return sum(thread == call[0] for thread, _ in tuple(self._calls)) > 1

    @abstractmethod
    def _release(self) -> None:
        """Release threads and simulators, once, while no call is in progress."""


def while_open(
    method: Callable[Concatenate[Env, Arguments], Result],
) -> Callable[Concatenate[Env, Arguments], Result]:
    """A method that raises ClosedEnvError after ``close``, and during which nothing is released."""

    @wraps(method)
    def guarded(self: Env, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        call = get_ident(), object()
        try:
            self._calls.add(call)
            if self._is_closed and not self._is_nested(call):
                raise ClosedEnvError(self.info.env_id)
            return method(self, *args, **kwargs)
        finally:
            self._calls.discard(call)
            if self._is_closed:
                self._release_unused()

    return guarded


class ThreadOwner:
    """The process that has the threads of an environment. Anybody else would wait for them without end."""

    def __init__(self, num_threads: int) -> None:
        self._pid = os.getpid() if num_threads > 1 else None

    def check(self) -> None:
        """Raise ForkedEnvError if this is another process; never with one thread, which is the caller's."""
        if self._pid is not None and self._pid != os.getpid():
            raise ForkedEnvError(self._pid)
