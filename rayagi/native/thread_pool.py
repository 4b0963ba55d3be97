"""Thread pool of compiled programs: the Python side of thread_pool.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

from collectives.mirrors import Mirrors
from rayagi.native.binding import pointer

_I64, _ADDRESS = ctypes.c_int64, ctypes.c_void_p
_LINE = 8


class _ThreadPoolStruct(ctypes.Structure):
    """ThreadPool of thread_pool.h."""

    shutdown: int
    _fields_ = (
        ("threads", _I64),
        ("claimed", _ADDRESS),
        ("job", _ADDRESS),
        ("argument", _ADDRESS),
        ("items", _I64),
        *((name, _I64) for name in ("posted", "accepting", "active", "shutdown")),
    )


MIRRORS: Mirrors = {"ThreadPool": _ThreadPoolStruct, "LINE": _LINE}


class ThreadPool:
    """The calling thread, and workers while a program runs.

    Attributes:
        threads: workers and the calling thread
        address: of thread_pool.h's ThreadPool
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """``library``: a program that includes thread_pool.h."""
        self._worker = library.rayagi_pool_worker
        self._worker.argtypes, self._worker.restype = (_ADDRESS, _I64), None
        self._claimed = torch.zeros((threads, _LINE), dtype=torch.int64)
        self._struct = _ThreadPoolStruct(threads, pointer(self._claimed))
        self.threads = threads
        self.address = ctypes.addressof(self._struct)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Workers take items inside the block. A job does not wait for a worker that has not started."""
        workers = list[Future[None]]()
        self._struct.shutdown = 0
        try:
            for thread in range(1, self.threads):
                workers.append(_pool(self.threads - 1).submit(self._worker, self.address, thread))
            yield
        finally:
            self._struct.shutdown = 1
            for worker in workers:
                if not worker.cancel():  # cancelled: it had not started
                    worker.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="learning")
