"""Clipping of a flat gradient in one call in place of seven operations of torch, three of which go through all of memory."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
from torch import Tensor

from collectives.compiler import CompilerError, load
from rayagi.native.headers import shared
from rayagi.native.pointers import pointer

PARTS = 16
"""PARTS of clip.h."""

_log = logging.getLogger(__name__)


def can_clip(gradients: Tensor) -> bool:
    """Whether there is a program for these, (S,): float32 on the host, S a multiple of PARTS."""
    fits = gradients.device.type == "cpu" and gradients.dtype == torch.float32 and len(gradients) % PARTS == 0
    return fits and _library() is not None


def clip(gradients: Tensor, max_norm: float) -> Tensor:
    """Scale ``gradients`` in place to a norm of at most ``max_norm`` (0: leave them). Returns the norm before, ()."""
    library = _library()
    assert library is not None
    return torch.tensor(library.rayagi_clip(pointer(gradients), len(gradients), max_norm))


@cache
def _library() -> ctypes.CDLL | None:
    """None where it cannot be compiled, which is logged once."""
    try:
        found = load(shared("clip.h"))
    except CompilerError as error:
        _log.info("gradients are clipped by torch: %s", error)
        return None
    found.rayagi_clip.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_double)
    found.rayagi_clip.restype = ctypes.c_double
    return found
