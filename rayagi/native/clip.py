"""A flat gradient's norm and its clipping: two calls in place of seven operations of torch, three of which go through all
of memory.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
from torch import Tensor

from collectives.compiler import CompilerError, load
from rayagi.native.headers import shared
from rayagi.native.pointers import pointer

_log = logging.getLogger(__name__)


def can_clip(gradients: Tensor) -> bool:
    """Whether there is a program for these: float32 on the host."""
    return gradients.device.type == "cpu" and gradients.dtype == torch.float32 and _library() is not None


def squares(gradients: Tensor) -> float:
    """The sum of their squares, (S,) -> ()."""
    library = _library()
    assert library is not None
    found: float = library.rayagi_squares(pointer(gradients), len(gradients))
    return found


def clip(gradients: Tensor, norm: float, max_norm: float) -> None:
    """Scale a part of gradients in place, (S,), so that the ``norm`` of all becomes at most ``max_norm`` (0: leave it)."""
    library = _library()
    assert library is not None
    library.rayagi_clip(pointer(gradients), len(gradients), norm, max_norm)


@cache
def _library() -> ctypes.CDLL | None:
    """None where it cannot be compiled, which is logged once."""
    try:
        found = load(shared("clip.h"))
    except CompilerError as error:
        _log.info("gradients are clipped by torch: %s", error)
        return None
    found.rayagi_squares.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    found.rayagi_squares.restype = ctypes.c_double
    found.rayagi_clip.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double)
    found.rayagi_clip.restype = None
    return found
