"""Room for contacts and constraints, which MuJoCo Warp wants to know before it begins: measured on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.tasks.task import Task
from rayagi.envs.tasks.vec_env import TaskVecEnv, describe

_WORLDS, _STEPS, _LOOK_EVERY = 8, 100, 5
"""Worlds, steps of random play (in which robots fall and begin anew), and after how many of them geoms are looked at."""
_MARGIN = 1.5
_SPARE_CONTACTS, _SPARE_CONSTRAINTS = 8, 16


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a world may hold at most."""

    contacts: int
    """Of one world, on average: MuJoCo Warp pools them over all. Pairs of geoms near each other need as many places."""
    constraints: int
    """Of one world, no world may have more."""


def measured(task: Task, model: mujoco.MjModel) -> Capacity:
    """The most that is seen in random play of a task, half as much again, and some; constraints for as many contacts.

    Where the model's ``<size nconmax njmax>`` says so, what it says. Worlds that exceed it count a fault.
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
        if step % _LOOK_EVERY == 0:
            positions = worlds.fields["geom_xpos"].numpy()
            axes = worlds.fields["geom_xmat"].numpy().reshape(_WORLDS, model.ngeom, 3, 3)[..., 2]
            contacts = max(contacts, *map(_near_pairs, [model] * _WORLDS, positions, axes))
    env.close()
    contacts = model.nconmax if model.nconmax > 0 else math.ceil(_MARGIN * contacts) + _SPARE_CONTACTS
    rows = max(math.ceil(_MARGIN * rows), contacts * _rows_of_a_contact(model)) + _SPARE_CONSTRAINTS
    return Capacity(contacts=contacts, constraints=model.njmax if model.njmax > 0 else rows)


def _rows_of_a_contact(model: mujoco.MjModel) -> int:
    """Constraints of one contact, of the most that geoms have."""
    largest = int(model.geom_condim.max(initial=1))
    pyramid = model.opt.cone == mujoco.mjtCone.mjCONE_PYRAMIDAL
    return max(1, 2 * (largest - 1)) if pyramid else largest


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
