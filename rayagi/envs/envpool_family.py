"""EnvPool's environments (an extra): native ones, stepped by a pool of threads."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np

from actors.protocols import EnvInfo
from rayagi.envs.envpool_adapter import EnvPoolVecEnv
from rayagi.envs.errors import EnvironmentOptionError, UnsupportedSpaceError
from rayagi.envs.families import Place, time_limit
from rayagi.envs.gymnasium_adapter import action_spec

ENGINE = "envpool"
_OURS = ("seed", "env_seed", "num_envs", "num_threads", "batch_size", "max_num_players")
"""Options that rayagi gives itself."""
_NO_LIMIT = int(np.iinfo(np.int32).max)


class EnvPoolTasks:
    """Implements Family. None is listed: there are thousands, and they are EnvPool's."""

    engines: tuple[str, ...] = (ENGINE,)

    def ids(self) -> Iterable[str]:
        """None."""
        return ()

    def knows(self, env_id: str) -> bool:
        """Whether EnvPool has the id.

        Raises:
            EnvironmentOptionError: EnvPool is not installed.
        """
        return env_id in _envpool(env_id).list_all_envs()

    def description(self, env_id: str) -> str:
        """None is listed."""
        return ""

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """EnvPool checks options when it makes a specification."""
        _options(env_id, kwargs)

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """From EnvPool's specification of the environment."""
        options, spec = _options(env_id, kwargs), None
        try:
            spec = _envpool(env_id).make_spec(env_id, **options)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise EnvironmentOptionError(
                env_id, f"EnvPool cannot make it with {dict(kwargs)}: {reason}"
            ) from error
        space = spec.gymnasium_observation_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise UnsupportedSpaceError(
                env_id, f"{space} of observations", "take a task whose observation is one flat Box"
            )
        limit = int(spec.config.max_episode_steps)
        return EnvInfo(
            env_id=env_id,
            engine=ENGINE,
            obs_dim=int(space.shape[0]),
            action=action_spec(env_id, spec.gymnasium_action_space),
            max_episode_steps=None if limit == _NO_LIMIT else limit,
        )

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], place: Place) -> EnvPoolVecEnv:
        """On threads of this process."""
        info, options = self.info(env_id, engine, kwargs), _options(env_id, kwargs)
        return EnvPoolVecEnv(_envpool(env_id), info, options, place)


def _options(env_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What EnvPool is made with, besides what rayagi gives."""
    for name in kwargs:
        if name in _OURS:
            raise EnvironmentOptionError(env_id, f"{name} is given by rayagi; leave it out of the options")
    limit, options = time_limit(env_id, kwargs, None)
    if "max_episode_steps" in kwargs:
        options["max_episode_steps"] = _NO_LIMIT if limit is None else limit
    return options


def _envpool(env_id: str) -> ModuleType:
    """EnvPool, imported only when it is asked for."""
    if importlib.util.find_spec("envpool") is None:
        raise EnvironmentOptionError(
            env_id, "engine envpool is an extra that is not installed: pip install 'rayagi[envpool]'"
        )
    import envpool

    return envpool
