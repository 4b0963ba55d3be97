"""Memory estimate of MuJoCo Warp, before allocation."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import mujoco
import mujoco_warp as mjw
import warp as wp

from rayagi.envs.mujoco_warp.capacity import Capacity

_REAL = 4
_SOLVER_ROWS = 8
"""Temporary reals of the solver per constraint: residual, direction, quadratics, lists of changes."""
_SOLVER_VECTORS = 24
"""Temporary vectors of size nv of solver and integrator."""
_TILE = 16
"""The solver pads nv to a multiple of this."""


def bytes_per_world(model: mujoco.MjModel, capacity: Capacity) -> int:
    """Bytes per additional world: its arrays (two worlds minus one, allocated on the CPU), and a step's temporaries.

    The temporaries are estimated from sizes: the solver's Hessian and its factor, rows per constraint, vectors, and the
    integrator's factor.
    """
    with wp.ScopedDevice("cpu"):
        one, two = (_data(model, capacity, num_worlds) for num_worlds in (1, 2))
    sparse = one.efc.J.shape[1] == 1
    padded, factor = (model.nv + _TILE if sparse else one.efc.J.shape[2]), one.qLD.shape[1]
    working = _REAL * (
        2 * padded**2
        + _SOLVER_ROWS * capacity.constraints
        + _SOLVER_VECTORS * model.nv
        + factor
        + 2 * int(model.nC)
    )
    return _bytes(two) - _bytes(one) + working


def _data(model: mujoco.MjModel, capacity: Capacity, num_worlds: int) -> Any:
    return mjw.make_data(model, nworld=num_worlds, nconmax=capacity.contacts, njmax=capacity.constraints)


def _bytes(data: Any) -> int:
    """Bytes of all arrays in a dataclass and its nested dataclasses; an array under two names counts once."""
    sizes: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, wp.array):
            sizes[value.ptr or 0] = value.capacity
        elif is_dataclass(value):
            for field in fields(value):
                visit(getattr(value, field.name))

    visit(data)
    return sum(sizes.values())
