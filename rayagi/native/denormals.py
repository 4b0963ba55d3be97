"""Flush denormals to zero in torch operations, as denormals.h does in compiled programs.

The mode is per thread. A torch worker thread inherits the mode of the thread that created it, so
``torch.set_flush_denormal`` alone changes either no worker, or new workers for good.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_SMALLEST_NORMAL = 2.0**-1022


def flushes_denormals() -> bool:
    """Whether this thread flushes denormals to zero."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flush denormals in this thread and in its torch workers inside the block; then restore this thread's mode in all.

    Does nothing on processors where torch cannot flush. Workers of another library than libgomp keep their mode.
    """
    if getattr(_nested, "inside", False):
        yield
        return
    before, _nested.inside = flushes_denormals(), True
    threads = torch.get_num_threads()
    _flush(True, threads)
    try:
        yield
    finally:
        # If the number of threads was lowered in the block, the unused workers still wait in libgomp's pool.
        _flush(before, max(threads, torch.get_num_threads()))
        _nested.inside = False


def _flush(on: bool, threads: int) -> None:
    torch.set_flush_denormal(on)  # first: workers that libgomp creates below inherit this thread's mode
    parallel = _parallel()
    if threads > 1 and parallel is not None:
        parallel(_SET_MODE[on], None, threads, 0)


_nested = threading.local()
_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_SET_MODE = {
    on: _Region(lambda _, on=on: torch.set_flush_denormal(on) and None) for on in (False, True)
}  # kept: C calls them


@cache
def _parallel() -> ctypes._NamedFuncPointer | None:
    """libgomp's GOMP_parallel: calls a function in each thread of a parallel region, torch's workers included."""
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if found is not None:
        found.argtypes = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        found.restype = None
    return found
