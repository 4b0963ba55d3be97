"""Compiled program of learners: gradients of PPO's loss, and optimizer steps."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from collectives.kernels import Kernel
from rayagi.native.binding import numbers, shared

LEARNING = Kernel(
    name="learning",
    module=__name__,
    reference="rayagi.algorithms.ppo.learner:PPOUpdater.minibatch_step",
    without="learners compute gradients with torch",
)
LANES = 32
"""Samples per tile."""
CHUNK = 16
"""Tiles that pass through the whole network before the next ones: their activations stay in the cache."""
PAD = 384
"""Unused floats between tiles, so that they do not compete for the same cache sets."""


@cache
def library() -> ctypes.CDLL | None:
    """The program, the same for all networks; None if it cannot be compiled, which is logged once."""
    return LEARNING.made_or_none(_load)


def _load() -> ctypes.CDLL:
    sizes = f"#define L {LANES}\n#define CHUNK {CHUNK}\n#define PAD {PAD}"
    headers = map(shared, ("thread_pool.h", "optimizer_step.h", "backprop.h", "ppo.h"))
    from rayagi.native import optimizer_step, ppo, thread_pool  # here: they import the sizes above

    found = LEARNING.load(
        "\n".join([sizes, numbers(torch.float32), *headers]),
        mirrors={**thread_pool.MIRRORS, **optimizer_step.MIRRORS, **ppo.MIRRORS},
    )
    found.rayagi_optimizer_step.argtypes = (ctypes.c_void_p,) * 3
    found.rayagi_optimizer_step.restype = None
    found.rayagi_ppo_gradient.argtypes = (ctypes.c_void_p,) * 5
    found.rayagi_ppo_gradient.restype = None
    found.rayagi_ppo_values.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_void_p)
    found.rayagi_ppo_values.restype = None
    return found
