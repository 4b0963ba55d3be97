"""A step along the mean of all trainers' gradients in one compiled call, in place of a dozen operations of torch.

Between two minibatches a core's caches hold activations: what Python and torch do there costs several times what it would by
itself.
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
from rayagi.native.pointers import pointer
from rayagi.native.thread_pool import ThreadPool

SHARE_STRIDE = 8
"""float64 numbers between two trainers' sums: they write to lines of their own."""
_STEP_CHUNK = 4096
_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_DONE = 3
PendingOperation = Literal["reduce", "barrier", "nothing"]
_PENDING: dict[int, PendingOperation] = {0: "reduce", 1: "barrier", 2: "barrier", 4: "nothing"}
"""PendingOperation optimizer_step.h's REDUCE, NORM, BARRIER and AGAIN ask for."""


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
        *((name, ctypes.c_float) for name in ("scale", "rate", "root")),
    )


MIRRORS: Mirrors = {
    "OptimizerStep": _OptimizerStepStruct,
    **{name: value for value, name in enumerate(("REDUCE", "NORM", "BARRIER", "DONE", "AGAIN"))},
    "STEP_CHUNK": _STEP_CHUNK,
    "STRIDE": SHARE_STRIDE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """PendingOperation one trainer steps, in place, and how. All tensors float32 on the host.

    Attributes:
        parameters, gradients, exp_avg, exp_avg_sq: (count,) each, of this trainer's share or of all
        steps: made so far, ()
        betas: Adam's
        eps: Adam's
        max_grad_norm: of all shares' gradients together; 0: any
        share_sums: where trainers of one copy see each other's sums of squares, (trainers, SHARE_STRIDE) float64
        rank: of this trainer among them
        reduces: whether other trainers' gradients belong to the mean
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
    """Steps as ``FlatAdam`` does, by gradients that stay as they were before clipping.

    Attributes:
        library: the program that it is of
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
            library: a program with optimizer_step.h
            stepped: what it steps
            operations: that it takes part in by itself
            python_operations: the same for when there are none
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
        """One step. Returns the norm of all gradients before clipping, (), and the seconds that ``run`` does."""
        norm, pool = torch.empty(()), ThreadPool(self.library, 1)
        step, at = self.library.rayagi_optimizer_step, (self.address, pool.address, pointer(norm))
        return norm, self.run(lambda: int(step(*at)), learning_rate)

    def run(self, program: Callable[[], int], learning_rate: float) -> float:
        """Let a program make steps of this size: it is called until it is done, and helped with operations of all trainers.

        Returns:
            Seconds in these operations, waiting for other trainers included.

        Raises:
            CommunicatorError: other trainers are lost.
        """
        optimizer_step, operations = self._optimizer_step, self._operations
        optimizer_step.learning_rate, optimizer_step.next, optimizer_step.waited_ns = learning_rate, 0, 0
        waited_s, began = 0.0, time.perf_counter()

        def asks() -> PendingOperation | None:
            nonlocal waited_s, began
            waited_s += time.perf_counter() - began
            found = program()
            began = time.perf_counter()
            return None if found == _DONE else _PENDING[found]

        if operations is None:
            while (what := asks()) is not None:
                self._python_operations[what]()
        else:
            addresses = {
                "reduce": operations.reduce_scatter,
                "barrier": operations.barrier,
                "nothing": 0,
                None: None,
            }
            operations.drive_program(lambda: addresses[asks()])
        return waited_s + 1e-9 * optimizer_step.waited_ns
