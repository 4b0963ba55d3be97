"""The compiled program of learners: gradients of PPO's loss, and steps along gradients."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch

from collectives.compiler import CompilerError, load
from rayagi.native.headers import numbers, shared

LANES = 32
"""Samples of a tile."""
CHUNK = 16
"""Tiles that go all the way before the next ones do."""
PAD = 384
"""Floats between tiles."""

_log = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """The same for all networks; None where it cannot be compiled, which is logged once."""
    sizes = f"#define L {LANES}\n#define CHUNK {CHUNK}\n#define PAD {PAD}"
    headers = map(shared, ("team.h", "descent.h", "backprop.h", "ppo.h"))
    try:
        found = load("\n".join([sizes, numbers(torch.float32), *headers]))
    except CompilerError as error:
        _log.info("learning by torch: %s", error)
        return None
    for function in (found.rayagi_descend, found.rayagi_ppo_update):
        function.restype = ctypes.c_int64
    found.rayagi_descend.argtypes = (ctypes.c_void_p,) * 3
    found.rayagi_ppo_update.argtypes = (ctypes.c_void_p,)
    found.rayagi_ppo_values.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_void_p)
    found.rayagi_ppo_values.restype = None
    return found
