"""Domain randomisation of masses, friction, actuator gains and damping (Tobin et al. 2017; Peng et al. 2018).

A world's factors are constant. They depend on (seed, global world index) alone, not on the layout of GMIs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mujoco
import numpy as np
import torch
from mujoco.batch import MODEL_FIELDS, Batch
from numpy.typing import NDArray

from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.tasks.random_uniforms import START, uniform

QUANTITIES: Mapping[str, tuple[str, ...]] = {
    "mass": ("body_mass", "body_inertia"),
    "friction": ("geom_friction", "pair_friction"),
    "gain": ("actuator_gainprm", "actuator_biasprm"),
    "damping": ("dof_damping",),
}
"""MjModel fields that each quantity's factor multiplies. Append new ones: the position selects the random number."""
_BEFORE_EPISODES = -1
Factors = Mapping[str, NDArray[np.float64]]
"""One factor per world, (N,), by quantity."""


def check_randomize(env_id: str, ranges: object) -> None:
    """Validate a task's option ``randomize``, such as ``{"mass": [0.8, 1.2]}``: ranges of the factors by quantity.

    Raises:
        EnvironmentOptionError: an unknown quantity or an invalid range; the message names it.
    """
    if not isinstance(ranges, Mapping):
        raise EnvironmentOptionError(
            env_id, f'randomize is {ranges!r}; it must map quantities to ranges, as {{"mass": [0.8, 1.2]}}'
        )
    for quantity, given in ranges.items():
        if quantity not in QUANTITIES:
            raise EnvironmentOptionError(
                env_id, f"randomize has no quantity {quantity!r}; it has {', '.join(QUANTITIES)}"
            )
        if not _is_range(given):
            raise EnvironmentOptionError(
                env_id,
                f"randomize.{quantity} is {given!r}; it must be [low, high] with 0 < low <= high, both finite",
            )


def _is_range(given: Any) -> bool:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        return False
    if any(isinstance(end, bool) or not isinstance(end, int | float) for end in given):
        return False
    return 0 < given[0] <= given[1] and math.isfinite(given[1])


def drawn_factors(ranges: Mapping[str, Sequence[float]], seed: int, first: int, num_worlds: int) -> Factors:
    """Uniform factors of worlds ``first`` to ``first + num_worlds - 1``, for the quantities in ``ranges``."""
    if not ranges:
        return {}
    worlds = torch.arange(first, first + num_worlds)
    draws = uniform(seed, worlds, torch.full_like(worlds, _BEFORE_EPISODES), START, len(QUANTITIES))
    columns = dict(zip(QUANTITIES, draws.double().numpy().T, strict=True))
    return {name: low + (high - low) * columns[name] for name, (low, high) in ranges.items()}


def vary(batch: Batch, factors: Factors) -> None:
    """Multiply a batch's per-world model fields by the factors, and recompute derived constants (mj_setConst)."""
    for quantity, factor in factors.items():
        for name in QUANTITIES[quantity]:
            values = batch.expand(name)
            values *= factor.reshape(-1, *(1,) * (values.ndim - 1))
    if "mass" in factors:
        batch.set_const()


def varied_fields(model: mujoco.MjModel, factors: Factors) -> dict[str, NDArray[np.float64]]:
    """MjModel fields that differ between worlds or from the model, (N, ...) each, for engines other than ``Batch``."""
    if not factors:
        return {}
    num_worlds = len(next(iter(factors.values())))
    batch = Batch(model, num_worlds, 0)
    vary(batch, factors)
    found = {name: batch.expanded(name) for name in MODEL_FIELDS if not name.startswith("opt.")}
    return {
        name: np.array(values)
        for name, values in found.items()
        if values is not None and (values != getattr(model, name)).any()
    }
