"""Sizes and actions of the environment that a run learns, kept with it: the environment's code may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from actors.protocols import ActionSpec, EnvInfo
from placement.errors import counted
from rayagi.run.errors import EnvironmentChangedError, RunFolderError

_ACTION_FIELDS = ("kind", "dim", "num_choices", "choices", "low", "high", "starts")


def env_to_dict(info: EnvInfo) -> dict[str, Any]:
    """What is kept in run.json."""
    action = {name: getattr(info.action, name) for name in _ACTION_FIELDS}
    for name in ("low", "high"):  # JSON has no infinite numbers
        action[name] = [bound if math.isfinite(bound) else str(bound) for bound in action[name]]
    return {"obs_dim": info.obs_dim, "action": action}


def refuse_changed_env(run: str, stored: Mapping[str, Any], info: EnvInfo) -> None:
    """Refuse an environment that is not the one that the run has learned.

    Args:
        run: its folder
        stored: of ``env_to_dict``; empty: the run is of a version of rayagi that did not keep it
        info: of the environment now

    Raises:
        EnvironmentChangedError: an observation has another size, or actions are others.
        RunFolderError: ``stored`` is damaged.
    """
    if not stored:
        return
    try:
        obs_dim, before = int(stored["obs_dim"]), _action(stored["action"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(run, f"run.json is damaged (environment: {error})") from error
    now = _action(env_to_dict(info)["action"])
    differences = []
    if obs_dim != info.obs_dim:
        differences.append(f"an observation had {counted(obs_dim, 'number')} and has {info.obs_dim}")
    if before != now or _starts(before) != _starts(now):
        differences.append(f"actions were {_text(before)} and are {_text(now)}")
    if differences:
        raise EnvironmentChangedError(run, info.env_id, ", and ".join(differences))


def _action(stored: Mapping[str, Any]) -> ActionSpec:
    return ActionSpec(
        kind=stored["kind"],
        dim=stored["dim"],
        num_choices=stored["num_choices"],
        choices=tuple(stored["choices"]),
        low=tuple(map(float, stored["low"])),
        high=tuple(map(float, stored["high"])),
        starts=tuple(stored["starts"]),
    )


def _starts(action: ActionSpec) -> tuple[int, ...]:
    """Specs that differ in these alone are equal."""
    return action.starts or (0,) * action.dim


def _text(action: ActionSpec) -> str:
    begin = f" that begin at {', '.join(map(str, action.starts))}" if any(action.starts) else ""
    if action.kind == "discrete":
        return counted(action.num_choices, "choice") + begin
    if action.kind == "multi_discrete":
        return " x ".join(map(str, action.choices)) + " choices" + begin
    bounds = list(zip(action.low, action.high, strict=True))
    ranges = [f"[{low:.9g}, {high:.9g}]" for low, high in (bounds[:1] if len(set(bounds)) == 1 else bounds)]
    return f"{counted(action.dim, 'real')} in {' x '.join(ranges)}"
