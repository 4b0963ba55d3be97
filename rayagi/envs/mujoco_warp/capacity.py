"""Room for contacts and constraints, which MuJoCo Warp wants to know before it begins: measured on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco
import numpy as np
from mujoco.batch import Batch
from numpy.typing import NDArray

_WORLDS, _SUBSTEPS, _HOLD = 8, 400, 10
"""Worlds, substeps, and substeps for which a random control is held. Seconds of play, in which robots fall and tumble."""
_MARGIN = 1.5
_SPARE_CONTACTS, _SPARE_CONSTRAINTS = 8, 16


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a world may hold at most."""

    contacts: int
    """Of one world, on average: MuJoCo Warp pools them over all. Pairs of geoms near each other need as many places."""
    constraints: int
    """Of one world, no world may have more."""


def measured(model: mujoco.MjModel) -> Capacity:
    """The most that is seen in random play from the model's own pose, half as much again, and some.

    Where the model's ``<size nconmax njmax>`` says so, what it says. Worlds that exceed it count a fault.
    """
    rng = np.random.default_rng(0)
    controls = rng.uniform(size=(_WORLDS, math.ceil(_SUBSTEPS / _HOLD), model.nu)).repeat(_HOLD, axis=1)
    limited = model.actuator_ctrllimited.astype(bool)
    low = np.where(limited, model.actuator_ctrlrange[:, 0], -1.0)
    high = np.where(limited, model.actuator_ctrlrange[:, 1], 1.0)
    batch = Batch(model, _WORLDS, 1)
    batch.bind("qvel")[:] = 0.5 * rng.standard_normal((_WORLDS, model.nv))
    found = batch.rollout(
        _SUBSTEPS,
        control=low + (high - low) * controls[:, :_SUBSTEPS],
        record=("ncon", "nefc", "geom_xpos", "geom_xmat"),
    )
    near = max(
        _near_pairs(model, positions, axes)
        for positions, axes in zip(
            found["geom_xpos"][:, ::_HOLD].reshape(-1, model.ngeom, 3),
            found["geom_xmat"][:, ::_HOLD].reshape(-1, model.ngeom, 3, 3)[..., 2],
            strict=True,
        )
    )
    contacts = _MARGIN * max(int(found["ncon"].max()), near) + _SPARE_CONTACTS
    constraints = _MARGIN * int(found["nefc"].max()) + _SPARE_CONSTRAINTS
    return Capacity(
        contacts=model.nconmax if model.nconmax > 0 else math.ceil(contacts),
        constraints=model.njmax if model.njmax > 0 else math.ceil(constraints),
    )


def _near_pairs(model: mujoco.MjModel, positions: NDArray[np.float64], axes: NDArray[np.float64]) -> int:
    """Pairs of geoms whose bounding spheres meet, which is what the broad phase lets through, and a few more.

    Args:
        positions: of the geoms            (ngeom, 3)
        axes: their z axes, planes' normals (ngeom, 3)
    """
    body = model.body_weldid[model.geom_bodyid]
    parent = model.body_weldid[model.body_parentid[body]]
    may = (model.geom_contype[:, None] & model.geom_conaffinity[None, :]) != 0
    may = np.triu(may | may.T, 1) & (body[:, None] != body[None, :])
    kin = ((parent[:, None] == body[None, :]) & (body[None, :] != 0)) | (
        (parent[None, :] == body[:, None]) & (body[:, None] != 0)
    )
    may &= ~kin
    offsets = positions[:, None] - positions[None, :]
    reach = model.geom_rbound + model.geom_margin
    distances = np.linalg.norm(offsets, axis=-1)
    above = np.einsum("ijk,jk->ij", offsets, axes)
    plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    distances = np.where(plane[None, :], above, np.where(plane[:, None], above.T, distances))
    return int((may & (distances <= reach[:, None] + reach[None, :])).sum()) + model.npair
