"""Capacity for contacts and constraints, which MuJoCo Warp allocates in advance, and the memory of a world."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from numpy.typing import NDArray

from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.tasks.task import Task
from rayagi.envs.tasks.vec_env import TaskVecEnv, describe

_WORLDS, _STEPS, _PAIRS_EVERY = 8, 100, 5
"""Worlds, steps with random actions (in which robots fall and are reset), and the interval of counting geom pairs."""
_MARGIN = 1.5
_SPARE_CONTACTS, _SPARE_CONSTRAINTS = 8, 16


@dataclass(frozen=True, slots=True)
class Capacity:
    """Maximum contacts and constraints per world."""

    contacts: int
    """nconmax: average per world, since MuJoCo Warp pools contacts over all worlds. Also bounds broad-phase pairs."""
    constraints: int
    """njmax: maximum constraint rows of any world."""


def measured(task: Task, model: mujoco.MjModel) -> Capacity:
    """1.5 x the maximum under random actions, plus a constant; constraints also suffice for the contacts.

    The model's ``<size nconmax njmax>`` overrides it. A world that exceeds the capacity counts a simulation error.
    """
    worlds = CpuBatchedSim(model, _WORLDS, 1, (*task.fields, "ncon", "nefc", "geom_xpos", "geom_xmat"))
    rules = task.rules(model, device=worlds.device, dtype=worlds.dtype)
    env = TaskVecEnv(describe("", "mujoco_cpu", task, task.max_episode_steps), rules, worlds)
    generator = torch.Generator().manual_seed(0)
    env.reset()
    contacts, rows = 0, 0
    for step in range(_STEPS):
        env.step(2.0 * torch.rand((_WORLDS, task.action_dim), generator=generator) - 1.0)
        contacts = max(contacts, int(worlds.fields["ncon"].max()))
        rows = max(rows, int(worlds.fields["nefc"].max()))
        if step % _PAIRS_EVERY == 0:
            positions = worlds.fields["geom_xpos"].numpy()
            axes = worlds.fields["geom_xmat"].numpy().reshape(_WORLDS, model.ngeom, 3, 3)[..., 2]
            contacts = max(contacts, *map(_near_pairs, [model] * _WORLDS, positions, axes))
    env.close()
    contacts = model.nconmax if model.nconmax > 0 else math.ceil(_MARGIN * contacts) + _SPARE_CONTACTS
    rows = max(math.ceil(_MARGIN * rows), contacts * _rows_of_a_contact(model)) + _SPARE_CONSTRAINTS
    return Capacity(contacts=contacts, constraints=model.njmax if model.njmax > 0 else rows)


def _rows_of_a_contact(model: mujoco.MjModel) -> int:
    """Constraint rows of one contact with the largest condim: condim (elliptic) or 2 (condim - 1) (pyramidal)."""
    largest = int(model.geom_condim.max(initial=1))
    pyramid = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    return max(1, 2 * (largest - 1)) if pyramid else largest


def _near_pairs(model: mujoco.MjModel, positions: NDArray[np.float64], axes: NDArray[np.float64]) -> int:
    """Number of geom pairs whose bounding spheres overlap: an upper bound of the broad phase's result.

    Args:
        positions: of the geoms                (ngeom, 3)
        axes: their z axes; normals of planes  (ngeom, 3)
    """
    # 1. Collision filter: contype & conaffinity, different bodies, no parent and child (unless the parent is the world).
    body = model.body_weldid[model.geom_bodyid]
    parent = model.body_weldid[model.body_parentid[body]]
    may = (model.geom_contype[:, None] & model.geom_conaffinity[None, :]) != 0
    may = np.triu(may | may.T, 1) & (body[:, None] != body[None, :])
    kin = ((parent[:, None] == body[None, :]) & (body[None, :] != 0)) | (
        (parent[None, :] == body[:, None]) & (body[:, None] != 0)
    )
    may &= ~kin
    # 2. Distances of centres, or above a plane, against the sums of the bounding radii.
    offsets = positions[:, None] - positions[None, :]
    reach = model.geom_rbound + model.geom_margin
    distances = np.linalg.norm(offsets, axis=-1)
    above = np.einsum("ijk,jk->ij", offsets, axes)
    plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    distances = np.where(plane[None, :], above, np.where(plane[:, None], above.T, distances))
    return int((may & (distances <= reach[:, None] + reach[None, :])).sum()) + model.npair


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
