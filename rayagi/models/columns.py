"""Columns of an observation that only the value network sees (an asymmetric critic, Pinto et al. 2018)."""

from __future__ import annotations

import re
from dataclasses import replace

from actors.protocols import EnvInfo, ObsPart
from placement.errors import counted
from rayagi.config.errors import ConfigError

_RANGE = re.compile(r"(\d*):(\d*)")


def policy_view(info: EnvInfo, critic_only: tuple[str, ...]) -> tuple[EnvInfo, tuple[int, ...]]:
    """The environment as the policy network sees it, and the columns of the observation that it sees.

    Args:
        info: of the environment
        critic_only: keys of a Dict observation, or ranges of columns as ``begin:end``, without the end

    Raises:
        ConfigError: no such key or columns, a part of an image, or nothing left for the policy.
    """
    hidden = {column for name in critic_only for column in _columns(info, name, critic_only)}
    parts, begin = [], 0
    for part in info.obs_parts or (ObsPart(size=info.obs_dim, shape=(info.obs_dim,)),):
        kept = part.size - len(hidden.intersection(range(begin, begin + part.size)))
        if part.is_image and 0 < kept < part.size:
            reason = (
                f"takes a part of an image of {info.env_id}, which is columns {begin}:{begin + part.size}"
            )
            raise ConfigError("network.critic_only", critic_only, reason, "take all of it, or none")
        if kept:
            parts.append(part if part.is_image else ObsPart(size=kept, shape=(kept,)))
        begin += part.size
    if not parts:
        reason = f"leaves nothing of {info.env_id}'s {counted(info.obs_dim, 'column')} for the policy"
        raise ConfigError("network.critic_only", critic_only, reason, "name fewer")
    columns = tuple(column for column in range(info.obs_dim) if column not in hidden)
    encoded = tuple(parts) if any(part.is_image for part in parts) else ()
    return replace(info, obs_dim=len(columns), obs_parts=encoded, frames=1), columns


def _columns(info: EnvInfo, name: str, critic_only: tuple[str, ...]) -> range:
    """The columns that one name stands for."""
    begin = 0
    for key, size in info.obs_members:
        if key == name:
            return range(begin, begin + size)
        begin += size
    match = _RANGE.fullmatch(name)
    if match is not None:
        first, end = int(match[1] or 0), int(match[2] or info.obs_dim)
        if first < end <= info.obs_dim:
            return range(first, end)
        reason = f"has {name!r}, and {info.env_id} has columns 0:{info.obs_dim}"
        raise ConfigError(
            "network.critic_only", critic_only, reason, "name columns within them, begin before end"
        )
    keys = ", ".join(key for key, _ in info.obs_members)
    has = f"its keys are {keys}" if keys else "its observation is one vector without names"
    raise ConfigError(
        "network.critic_only",
        critic_only,
        f"names {name!r}, which {info.env_id} does not have: {has}",
        f"use {'one of them, or ' if keys else ''}a range of its "
        f"{counted(info.obs_dim, 'column')}, such as 0:{min(3, info.obs_dim)}",
    )
