"""Whether a checkpoint's state fits an Algorithm: with other networks or normalisation it would learn and act wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from actors.protocols import EnvInfo
from rayagi.config.spec import RunSpec

_FREE = frozenset({"initial_log_std"})
"""Fields of a NetworkSpec that matter only before the first update."""
_OF_NORMALISERS = ("normalize_obs", "obs_clip", "normalize_rewards")


def meaning_of_state(spec: RunSpec, info: EnvInfo) -> dict[str, str]:
    """What decides how a state's parameters are used, by its name in the settings."""
    network = {
        f"network.{field.name}": getattr(spec.network, field.name)
        for field in fields(spec.network)
        if field.name not in _FREE
    }
    normalisers = {f"{spec.algorithm}.{name}": getattr(spec.learning, name) for name in _OF_NORMALISERS}
    values = {
        "algorithm": spec.algorithm,
        "columns of an observation": info.obs_dim,
        "actions": info.action,
        **network,
        **normalisers,
    }
    return {name: str(value) for name, value in values.items()}


def refuse_unfit_state(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Compare the ``meaning_of_state`` of a checkpoint with an Algorithm's.

    Raises:
        ValueError: what differs first.
    """
    for name, value in saved.items():
        if own.get(name, value) != value:
            raise ValueError(
                f"the checkpoint has {name} = {value}, and this algorithm {own[name]}: build it with the checkpoint's "
                "settings, or with from_checkpoint()"
            )
