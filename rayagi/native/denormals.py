"""Denormals as zeros in torch's arithmetic, as compiled programs have them by denormals.h.

A processor keeps that mode per thread. Torch's worker threads have the mode in which they were made by the
thread that they work for: ``torch.set_flush_denormal`` alone reaches none of them, or all for ever.
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
    """Whether this thread takes denormals for zeros."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Denormals are zeros in this thread and in the workers of its torch operations; then all have this earlier mode.

    Nothing changes on processors on which torch cannot do it. Workers that are not libgomp's keep their mode.
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
        # Workers that torch no longer uses, because it got fewer threads meanwhile, wait in libgomp's pool.
        _flush(before, max(threads, torch.get_num_threads()))
        _nested.inside = False


def _flush(on: bool, threads: int) -> None:
    torch.set_flush_denormal(on)  # first: workers that libgomp makes below have this thread's mode
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
    """libgomp's call of a function on every thread of a parallel region, the caller and torch's workers for it."""
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if found is not None:
        found.argtypes = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        found.restype = None
    return found
