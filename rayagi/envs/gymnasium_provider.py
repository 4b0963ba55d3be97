"""Environment provider for Gymnasium's registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs import gymnasium_adapter
from rayagi.envs.providers import VecEnvArgs


class GymnasiumProvider:
    """Implements EnvProvider. Lists no ids: the registry belongs to Gymnasium."""

    engines: tuple[str, ...] = (gymnasium_adapter.ENGINE,)

    def ids(self) -> Iterable[str]:
        """Empty: no ids are listed."""
        return ()

    def knows(self, env_id: str) -> bool:
        """Whether ``gymnasium.make`` knows it."""
        return gymnasium_adapter.is_registered(env_id)

    def description(self, env_id: str) -> str:
        """Empty: no ids are listed."""
        return ""

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """No-op: Gymnasium checks options when it makes an environment."""

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Describe the environment; makes one instance for it."""
        return gymnasium_adapter.describe(env_id, kwargs)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Make a vectorized environment that steps its environments in sequence in this process."""
        return gymnasium_adapter.GymnasiumVecEnv(
            env_id,
            kwargs,
            num_envs=env_args.num_envs,
            first_env_index=env_args.first_env_index,
            seed=env_args.seed,
        )
