"""Protocol of a batched simulation: N worlds of one MuJoCo model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

SIM_ERRORS = ("unstable", "contact overflow", "constraint overflow")
"""Kinds of simulation errors. Unstable: a non-finite or huge state, or a singular inertia. Overflow: the capacity for
contacts or constraints is exceeded."""


class BatchedSim(Protocol):
    """N worlds of one model.

    Attributes:
        num_worlds: N
        device: device of the fields
        dtype: real type of the fields: float64 on mujoco_cpu, float32 on mujoco_warp
        fields: qpos, qvel and the requested MjData fields, (N, ...). Live: ``step`` and ``restart`` update these same
            tensors in place. Read-only for callers
    """

    num_worlds: int
    device: torch.device
    dtype: torch.dtype
    fields: dict[str, Tensor]

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """Counts by ``SIM_ERRORS``, since construction."""

    def step(self, controls: Tensor, num_substeps: int) -> Tensor | None:
        """Advance every world; ``controls`` (N, nu).

        Returns:
            worlds with a simulation error, which must be restarted, (N,) bool; None if none has one.
        """

    def restart(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset worlds ``ids`` (M,) to a state, (M, nq) and (M, nv), and compute the derived fields (forward pass)."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``'s values: on the CPU the next step is bit-identical."""

    def close(self) -> None:
        """Release threads and memory."""
