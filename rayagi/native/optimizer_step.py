"""Compiled optimizer step: reduce gradients over the trainers, clip them and apply Adam in one call.

It replaces a dozen torch operations. Between two minibatches the caches hold activations, so Python and torch run several
times slower there than alone.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from collectives.mirrors import Mirrors
from collectives.transports.base import CompiledOperations
from rayagi.native.binding import pointer
from rayagi.native.thread_pool import ThreadPool

SHARE_STRIDE = 8
"""float64 values from one trainer's sum to the next, a cache line: trainers do not write to the same line."""
_STEP_CHUNK = 4096
_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_DONE = 3
PendingOperation = Literal["reduce", "barrier", "nothing"]
_PENDING: dict[int, PendingOperation] = {0: "reduce", 1: "barrier", 2: "barrier", 4: "nothing"}
"""The operation to complete after REDUCE, NORM, BARRIER and AGAIN of optimizer_step.h."""


class _OptimizerStepStruct(ctypes.Structure):
    """OptimizerStep of optimizer_step.h."""

    learning_rate: float
    next: int
    waited_ns: int
    _fields_ = (
        *((name, _ADDRESS) for name in ("parameters", "gradients", "exp_avg", "exp_avg_sq")),
        ("count", _I64),
        ("steps", _ADDRESS),
        *((name, _DOUBLE) for name in ("learning_rate", "beta1", "beta2", "eps", "max_grad_norm")),
        *((name, _ADDRESS) for name in ("chunk_sums", "share_sums")),
        *((name, _I64) for name in ("rank", "trainers", "reduces")),
        *((name, _ADDRESS) for name in ("run", "member", "reduce", "barrier")),
        ("next", _I64),
        ("waited_ns", _I64),
        *((name, ctypes.c_float) for name in ("grad_scale", "step_size", "inverse_bias")),
    )


MIRRORS: Mirrors = {
    "OptimizerStep": _OptimizerStepStruct,
    **{name: value for value, name in enumerate(("REDUCE", "NORM", "BARRIER", "DONE", "AGAIN"))},
    "STEP_CHUNK": _STEP_CHUNK,
    "STRIDE": SHARE_STRIDE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """What one trainer updates in place, and the optimizer's settings. Tensors are float32 on the host.

    Attributes:
        parameters, gradients, exp_avg, exp_avg_sq: (count,) each, of this trainer's share or of all
        steps: steps done so far, ()
        betas, eps: Adam's
        max_grad_norm: limit of the norm over all shares; 0: no clipping
        share_sums: sum of squared gradients of each share, (trainers, SHARE_STRIDE) float64, in memory that all trainers see
        rank: of this trainer among those that share the parameters
        reduces: whether gradients are averaged over trainers
    """

    parameters: Tensor
    gradients: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    share_sums: Tensor
    rank: int
    reduces: bool


class CompiledOptimizerStep:
    """The compiled counterpart of ``FlatAdam``. Gradients keep their values from before clipping.

    Attributes:
        library: the compiled program
        address: of optimizer_step.h's OptimizerStep
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        state: OptimizerState,
        operations: CompiledOperations | None,
        python_operations: Mapping[PendingOperation, Callable[[], object]],
    ) -> None:
        """
        Args:
            library: a program that includes optimizer_step.h
            state: what it updates
            operations: collective operations that the program can run itself; None: it returns to Python for them
            python_operations: the same operations in Python, for that case
        """
        self._kept = state, torch.zeros(-(-len(state.parameters) // _STEP_CHUNK), dtype=torch.float64)
        self._operations = operations
        self._python_operations: Mapping[PendingOperation, Callable[[], object]] = {
            "nothing": lambda: None,
            **python_operations,
        }
        compiled = (0, 0, 0, 0)
        if operations is not None:
            compiled = operations.run, operations.member, operations.reduce_scatter, operations.barrier
        self._optimizer_step = _OptimizerStepStruct(
            *map(pointer, (state.parameters, state.gradients, state.exp_avg, state.exp_avg_sq)),
            len(state.parameters),
            pointer(state.steps),
            0.0,
            *state.betas,
            state.eps,
            state.max_grad_norm,
            pointer(self._kept[1]),
            pointer(state.share_sums),
            state.rank,
            len(state.share_sums),
            state.reduces,
            *compiled,
        )
        self.library, self.address = library, ctypes.addressof(self._optimizer_step)

    def step(self, learning_rate: float) -> tuple[Tensor, float]:
        """One step. Returns the norm of all gradients before clipping, (), and seconds in collective operations."""
        norm, pool = torch.empty(()), ThreadPool(self.library, 1)
        step, at = self.library.rayagi_optimizer_step, (self.address, pool.address, pointer(norm))
        return norm, self.run(lambda: int(step(*at)), learning_rate)

    def run(self, program: Callable[[], int], learning_rate: float) -> float:
        """Call a program until it is done, and complete the collective operations that it asks for.

        Returns:
            Seconds in collective operations, waiting for other trainers included.

        Raises:
            CommunicatorError: other trainers are lost.
        """
        optimizer_step, operations = self._optimizer_step, self._operations
        optimizer_step.learning_rate, optimizer_step.next, optimizer_step.waited_ns = learning_rate, 0, 0
        waited_s, began = 0.0, time.perf_counter()

        def next_operation() -> PendingOperation | None:
            nonlocal waited_s, began
            waited_s += time.perf_counter() - began
            state = program()
            began = time.perf_counter()
            return None if state == _DONE else _PENDING[state]

        if operations is None:
            while (operation := next_operation()) is not None:
                self._python_operations[operation]()
        else:
            addresses = {
                "reduce": operations.reduce_scatter,
                "barrier": operations.barrier,
                "nothing": 0,
                None: None,
            }
            operations.drive_program(lambda: addresses[next_operation()])
        return waited_s + 1e-9 * optimizer_step.waited_ns
