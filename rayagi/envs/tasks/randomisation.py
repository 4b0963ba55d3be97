"""Domain randomisation: worlds whose masses, friction, motors and damping differ (Tobin et al. 2017; Peng et al. 2018).

A world keeps its factors for ever. They come from (seed, global world index) alone, so that the layout does not matter.
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
"""What may be varied, and the MjModel fields that are multiplied. New ones go to the end: the place decides the draw."""
_BEFORE_EPISODES = -1
Factors = Mapping[str, NDArray[np.float64]]
"""Of each quantity, one factor per world, (N,)."""


def check_randomize(env_id: str, ranges: object) -> None:
    """Look at a task's option ``randomize``, such as ``{"mass": [0.8, 1.2]}``: quantities and ranges of their factors.

    Raises:
        EnvironmentOptionError: it is no such thing; the place is named.
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
    """Uniform factors of worlds ``first`` and on, of the quantities in ``ranges``."""
    if not ranges:
        return {}
    worlds = torch.arange(first, first + num_worlds)
    draws = uniform(seed, worlds, torch.full_like(worlds, _BEFORE_EPISODES), START, len(QUANTITIES))
    columns = dict(zip(QUANTITIES, draws.double().numpy().T, strict=True))
    return {name: low + (high - low) * columns[name] for name, (low, high) in ranges.items()}


def vary(batch: Batch, factors: Factors) -> None:
    """Give a batch's simulations their own models, constants that follow from them included."""
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
