"""How much memory MuJoCo Warp takes, told before it is taken."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import mujoco
import mujoco_warp as mjw
import warp as wp

from rayagi.envs.mujoco_warp.capacity import Capacity

_REAL = 4
_SOLVER_ROWS = 8
"""Reals per constraint that the solver works with: residual, direction, quadratics, lists of what changed."""
_SOLVER_VECTORS = 24
"""Vectors of nv that solver and integrator work with."""
_TILE = 16
"""By which the solver pads nv."""


def bytes_per_world(model: mujoco.MjModel, capacity: Capacity) -> int:
    """Bytes of one more world: what its arrays hold, by making one and two worlds, and what a step works with for a while.

    The latter is reckoned from the sizes: the solver's Hessian and its factor, rows per constraint, vectors, and a
    second factor of the integrator's.
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
    """Of all arrays in a dataclass, and in the dataclasses within; one array under two names counts once."""
    held: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, wp.array):
            held[value.ptr or 0] = value.capacity
        elif is_dataclass(value):
            for field in fields(value):
                look(getattr(value, field.name))

    look(data)
    return sum(held.values())
