"""The compiled program of learners: gradients of PPO's loss, and steps along gradients."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from rayagi.native.headers import numbers, shared
from rayagi.native.program import load_or_none

LANES = 32
"""Samples of a tile."""
CHUNK = 16
"""Tiles that go all the way before the next ones do."""
PAD = 384
"""Floats between tiles."""


@cache
def library() -> ctypes.CDLL | None:
    """The same for all networks; None where it cannot be compiled, which is logged once."""
    sizes = f"#define L {LANES}\n#define CHUNK {CHUNK}\n#define PAD {PAD}"
    headers = map(shared, ("team.h", "descent.h", "backprop.h", "ppo.h"))
    from rayagi.native import descent, ppo, team  # which need the sizes above

    found = load_or_none(
        "learning by torch",
        "\n".join([sizes, numbers(torch.float32), *headers]),
        mirrors={**team.MIRRORS, **descent.MIRRORS, **ppo.MIRRORS},
    )
    if found is None:
        return None
    for function in (found.rayagi_descend, found.rayagi_ppo_update):
        function.restype = ctypes.c_int64
    found.rayagi_descend.argtypes = (ctypes.c_void_p,) * 3
    found.rayagi_ppo_update.argtypes = (ctypes.c_void_p,)
    found.rayagi_ppo_values.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_void_p)
    found.rayagi_ppo_values.restype = None
    return found
