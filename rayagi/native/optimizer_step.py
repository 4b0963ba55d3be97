"""Compiled optimizer step: clip the mean gradient and apply Adam in one call.

It replaces a dozen torch operations. Between two minibatches the caches hold activations, so Python and torch run several
times slower there than alone.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.mirrors import Mirrors
from rayagi.native.binding import pointer
from rayagi.native.thread_pool import ThreadPool

_STEP_CHUNK = 4096
_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _OptimizerStepStruct(ctypes.Structure):
    """OptimizerStep of optimizer_step.h."""

    learning_rate: float
    _fields_ = (
        *((name, _ADDRESS) for name in ("parameters", "gradients", "exp_avg", "exp_avg_sq")),
        ("count", _I64),
        ("steps", _ADDRESS),
        *((name, _DOUBLE) for name in ("learning_rate", "beta1", "beta2", "eps", "max_grad_norm")),
        ("chunk_sums", _ADDRESS),
        *((name, ctypes.c_float) for name in ("grad_scale", "step_size", "inverse_bias")),
    )


MIRRORS: Mirrors = {"OptimizerStep": _OptimizerStepStruct, "STEP_CHUNK": _STEP_CHUNK}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """What a step updates in place, and the optimizer's settings. Tensors are float32 on the host.

    Attributes:
        parameters, gradients, exp_avg, exp_avg_sq: (count,) each
        steps: steps done so far, ()
        betas, eps: Adam's
        max_grad_norm: limit of the gradient's norm; 0: no clipping
    """

    parameters: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float


class CompiledOptimizerStep:
    """The compiled counterpart of ``FlatAdam``. Gradients keep their values from before clipping.

    Attributes:
        library: the compiled program
    """

    def __init__(self, library: ctypes.CDLL, state: OptimizerState) -> None:
        """``library``: a program that includes optimizer_step.h."""
        self._kept = state, torch.zeros(-(-len(state.parameters) // _STEP_CHUNK), dtype=torch.float64)
        self._optimizer_step = _OptimizerStepStruct(
            *map(pointer, (state.parameters, state.gradients, state.exp_avg, state.exp_avg_sq)),
            len(state.parameters),
            pointer(state.steps),
            0.0,
            *state.betas,
            state.eps,
            state.max_grad_norm,
            pointer(self._kept[1]),
        )
        self.library, self._address = library, ctypes.addressof(self._optimizer_step)

    def step(self, learning_rate: float, pool: ThreadPool | None = None) -> Tensor:
        """One step, on the threads of ``pool`` or on the calling thread. Returns the norm before clipping, ()."""
        self._optimizer_step.learning_rate = learning_rate
        pool, norm = pool or ThreadPool(self.library, 1), torch.empty(())
        self.library.rayagi_optimizer_step(self._address, pool.address, pointer(norm))
        return norm
