"""team.h: threads that help one program."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

from collectives.mirrors import Mirrors
from rayagi.native.pointers import pointer

_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_LINE = 8


class _Team(ctypes.Structure):
    """Team of team.h."""

    home: int
    _fields_ = (
        ("threads", _I64),
        ("taken", _ADDRESS),
        ("job", _ADDRESS),
        ("given", _ADDRESS),
        ("items", _I64),
        *((name, _I64) for name in ("posted", "open", "inside", "home")),
    )


MIRRORS: Mirrors = {"Team": _Team, "LINE": _LINE}


class Team:
    """This thread, and others while a program runs.

    Attributes:
        address: of team.h's Team
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """``library``: a program with team.h."""
        self._help = library.rayagi_help
        self._help.argtypes, self._help.restype = (_ADDRESS, _I64), None
        self._taken = torch.zeros((threads, _LINE), dtype=torch.int64)
        self._team = _Team(threads, pointer(self._taken))
        self.threads = threads
        self.address = ctypes.addressof(self._team)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The others help meanwhile, as soon as they can."""
        others = list[Future[None]]()
        self._team.home = 0
        try:
            for thread in range(1, self.threads):
                others.append(_pool(self.threads - 1).submit(self._help, self.address, thread))
            yield
        finally:
            self._team.home = 1
            for other in others:
                if not other.cancel():  # it did not begin
                    other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="learning")
