"""What runs a task's physics: N worlds of one model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

SIM_ERRORS = ("unstable", "contact overflow", "constraint overflow")
"""What can go wrong in a world: its state leaves the finite numbers (or the inertia becomes singular), or there was no room
for a contact or a constraint."""


class BatchedSim(Protocol):
    """N worlds of one model.

    Attributes:
        num_worlds: N
        device: where the fields live
        dtype: real type of the fields: float64 on the CPU, float32 on a GPU
        fields: qpos, qvel and the fields asked for, (N, ...). Live: the same tensors for ever, which ``step`` and
            ``restart`` fill; not to be written
    """

    num_worlds: int
    device: torch.device
    dtype: torch.dtype
    fields: dict[str, Tensor]

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """How many times what of ``SIM_ERRORS`` went wrong, since the beginning."""
        ...

    def step(self, controls: Tensor, num_substeps: int) -> Tensor | None:
        """Advance every world; ``controls`` (N, nu).

        Returns:
            which worlds had a fault and must be restarted, (N,) bool; None where all are known to be well.
        """
        ...

    def restart(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset worlds ``ids`` (M,) to a state, (M, nq) and (M, nv), and compute what derives from it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``'s values: the next step is equal to the last bit on the CPU."""
        ...

    def close(self) -> None:
        """Release threads and memory."""
        ...
