"""Environments that are made by a class or a function in RLlib's convention: called with ``env_config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

NAMESPACE = "rllib/"
"""Start of their ids."""


class EnvContext(dict[str, Any]):
    """``env_config`` with the attributes of RLlib's class of this name, which GMIs do not import.

    Every environment is of worker 0: environments differ by the seed that they are reset with.
    """

    worker_index = vector_index = num_workers = 0
    remote = recreated_worker = False


@dataclass(frozen=True)
class Creator:
    """Entry point of such an environment."""

    create: Callable[[EnvContext], gymnasium.Env[Any, Any]]

    def __call__(self, env_config: Mapping[str, Any] | None = None) -> gymnasium.Env[Any, Any]:
        """Make one environment. Raises TypeError: it has several agents."""
        env = self.create(EnvContext(env_config or {}))
        if any(base.__name__ == "MultiAgentEnv" for base in type(env).__mro__):
            raise TypeError(
                f"{type(env).__name__} has several agents, and rayagi trains one policy of one agent"
            )
        return env


def register_creator(name: str, create: Callable[[EnvContext], gymnasium.Env[Any, Any]]) -> str:
    """Register with Gymnasium, in this process; returns the id. GMIs get the registration with the environments."""
    env_id = NAMESPACE + (re.sub(r"[^\w.-]+", "_", name).strip("_") or "env")
    gymnasium.registry[env_id] = EnvSpec(id=env_id, entry_point=Creator(create))
    return env_id
