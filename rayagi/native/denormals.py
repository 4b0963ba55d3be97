"""Flush denormals to zero in torch operations, as denormals.h does in compiled programs.

The mode is per thread. A torch worker thread inherits the mode of the thread that created it, so
``torch.set_flush_denormal`` alone changes either no worker, or new workers for good.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

_SMALLEST_NORMAL = 2.0**-1022
_CPU = torch.device("cpu")


def flushes_denormals() -> bool:
    """Whether this thread flushes denormals to zero."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


@contextmanager
def flushed_denormals(device: torch.device = _CPU) -> Iterator[None]:
    """Flush denormals in this thread and in its torch workers inside the block; then restore this thread's mode in all.

    Does nothing on processors where torch cannot flush, or where the block computes on another ``device`` than the CPU.
    Workers of another library than libgomp keep their mode.
    """
    if device.type != "cpu" or getattr(_nested, "inside", False):
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
    workers = _workers() if threads > 1 else None
    if workers is not None:
        parallel, get_mode, set_mode = workers
        mode = ctypes.create_string_buffer(_MODE_BYTES)
        get_mode(mode)
        parallel(set_mode, mode, threads, 0)


_nested = threading.local()
_MODE_BYTES = 64
"""At least those of a fenv_t: 32 on x86-64, 8 on aarch64."""


@cache
def _workers() -> tuple[Callable[..., int], Callable[..., int], int] | None:
    """libgomp's GOMP_parallel, which calls a function in each thread of a parallel region, torch's workers included; and
    what it calls there: the C library's fegetenv, and the address of its fesetenv, whose environment includes the mode.

    Not functions of Python: each thread would wait for the interpreter, for milliseconds where there are many.
    """
    loaded = ctypes.CDLL(None)
    parallel, get_mode, set_mode = (
        getattr(loaded, name, None) for name in ("GOMP_parallel", "fegetenv", "fesetenv")
    )
    if parallel is None or get_mode is None or set_mode is None:
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    address = ctypes.cast(set_mode, ctypes.c_void_p).value
    assert address is not None
    return parallel, get_mode, address
