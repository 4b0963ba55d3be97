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
from rayagi.native.team import Team

SHARE_STRIDE = 8
"""float64 numbers between two trainers' sums: they write to lines of their own."""
_PIECE = 4096
_I64, _ADDRESS, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_STEPPED = 3
What = Literal["reduce", "meet", "nothing"]
_ASKED: dict[int, What] = {0: "reduce", 1: "meet", 2: "meet", 4: "nothing"}
"""What descent.h's REDUCE, ADD, MEET and AGAIN ask for."""


class _Descent(ctypes.Structure):
    """Descent of descent.h."""

    learning_rate: float
    next: int
    waited_ns: int
    _fields_ = (
        *((name, _ADDRESS) for name in ("parameters", "gradients", "exp_avg", "exp_avg_sq")),
        ("count", _I64),
        ("steps", _ADDRESS),
        *((name, _DOUBLE) for name in ("learning_rate", "beta1", "beta2", "eps", "max_grad_norm")),
        *((name, _ADDRESS) for name in ("of_pieces", "of_shares")),
        *((name, _I64) for name in ("rank", "trainers", "reduces")),
        *((name, _ADDRESS) for name in ("run", "member", "reduce", "meet")),
        ("next", _I64),
        ("waited_ns", _I64),
        *((name, ctypes.c_float) for name in ("scale", "rate", "root")),
    )


MIRRORS: Mirrors = {
    "Descent": _Descent,
    **{name: value for value, name in enumerate(("REDUCE", "ADD", "MEET", "STEPPED", "AGAIN"))},
    "PIECE": _PIECE,
    "STRIDE": SHARE_STRIDE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """What one trainer steps, in place, and how. All tensors float32 on the host.

    Attributes:
        parameters, gradients, exp_avg, exp_avg_sq: (count,) each, of this trainer's share or of all
        steps: made so far, ()
        betas: Adam's
        eps: Adam's
        max_grad_norm: of all shares' gradients together; 0: any
        of_shares: where trainers of one copy see each other's sums of squares, (trainers, SHARE_STRIDE) float64
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
    of_shares: Tensor
    rank: int
    reduces: bool


class CompiledDescent:
    """Steps as ``FlatAdam`` does, by gradients that stay as they were before clipping.

    Attributes:
        library: the program that it is of
        address: of descent.h's Descent
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        stepped: Stepped,
        operations: CompiledOperations | None,
        by_python: Mapping[What, Callable[[], object]],
    ) -> None:
        """
        Args:
            library: a program with descent.h
            stepped: what it steps
            operations: that it takes part in by itself
            by_python: the same for when there are none
        """
        self._kept = stepped, torch.zeros(-(-len(stepped.parameters) // _PIECE), dtype=torch.float64)
        self._operations = operations
        self._by_python: Mapping[What, Callable[[], object]] = {"nothing": lambda: None, **by_python}
        compiled = (0, 0, 0, 0)
        if operations is not None:
            compiled = operations.run, operations.member, operations.reduce_scatter, operations.barrier
        self._descent = _Descent(
            *map(pointer, (stepped.parameters, stepped.gradients, stepped.exp_avg, stepped.exp_avg_sq)),
            len(stepped.parameters),
            pointer(stepped.steps),
            0.0,
            *stepped.betas,
            stepped.eps,
            stepped.max_grad_norm,
            pointer(self._kept[1]),
            pointer(stepped.of_shares),
            stepped.rank,
            len(stepped.of_shares),
            stepped.reduces,
            *compiled,
        )
        self.library, self.address = library, ctypes.addressof(self._descent)

    def step(self, learning_rate: float) -> tuple[Tensor, float]:
        """One step. Returns the norm of all gradients before clipping, (), and the seconds that ``run`` does."""
        norm, team = torch.empty(()), Team(self.library, 1)
        descend, at = self.library.rayagi_descend, (self.address, team.address, pointer(norm))
        return norm, self.run(lambda: int(descend(*at)), learning_rate)

    def run(self, program: Callable[[], int], learning_rate: float) -> float:
        """Let a program make steps of this size: it is called until it is done, and helped with operations of all trainers.

        Returns:
            Seconds in these operations, waiting for other trainers included.

        Raises:
            CommunicatorError: other trainers are lost.
        """
        descent, operations = self._descent, self._operations
        descent.learning_rate, descent.next, descent.waited_ns = learning_rate, 0, 0
        waited_s, began = 0.0, time.perf_counter()

        def asks() -> What | None:
            nonlocal waited_s, began
            waited_s += time.perf_counter() - began
            found = program()
            began = time.perf_counter()
            return None if found == _STEPPED else _ASKED[found]

        if operations is None:
            while (what := asks()) is not None:
                self._by_python[what]()
        else:
            addresses = {
                "reduce": operations.reduce_scatter,
                "meet": operations.barrier,
                "nothing": 0,
                None: None,
            }
            operations.drive_program(lambda: addresses[asks()])
        return waited_s + 1e-9 * descent.waited_ns
