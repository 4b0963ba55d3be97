"""EnvPool's environments (an extra): native ones, stepped by a pool of threads."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np

from actors.protocols import EnvInfo
from rayagi.envs.envpool_adapter import EnvPoolVecEnv
from rayagi.envs.errors import EnvironmentOptionError, UnsupportedSpaceError
from rayagi.envs.gymnasium_adapter import action_spec
from rayagi.envs.providers import VecEnvArgs, time_limit

ENGINE = "envpool"
_OURS = ("seed", "env_seed", "num_envs", "num_threads", "batch_size", "max_num_players")
"""Options that rayagi gives itself."""
_NO_LIMIT = int(np.iinfo(np.int32).max)


class EnvPoolProvider:
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
        spec = _spec(env_id, _options(env_id, kwargs))
        with warnings.catch_warnings(action="ignore"):  # Gymnasium's, on the precision of EnvPool's bounds
            space, actions = spec.gymnasium_observation_space, spec.gymnasium_action_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise UnsupportedSpaceError(
                env_id, f"{space} of observations", "take a task whose observation is one flat Box"
            )
        limit = int(spec.config.max_episode_steps)
        return EnvInfo(
            env_id=env_id,
            engine=ENGINE,
            obs_dim=int(space.shape[0]),
            action=action_spec(env_id, actions),
            max_episode_steps=None if limit == _NO_LIMIT else limit,
        )

    def make(
        self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs
    ) -> EnvPoolVecEnv:
        """On threads of this process."""
        info, options = self.info(env_id, engine, kwargs), _options(env_id, kwargs)
        return EnvPoolVecEnv(_envpool(env_id), info, options, env_args)


def _spec(env_id: str, options: Mapping[str, Any]) -> Any:
    """EnvPool's specification of an environment."""
    envpool = _envpool(env_id)
    known = [name for name in envpool.make_spec(env_id).config._fields if name not in _OURS]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise EnvironmentOptionError(
            env_id, f"there is no option {', '.join(unknown)}; EnvPool's has {', '.join(known)}"
        )
    try:
        return envpool.make_spec(env_id, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = "a value of the wrong kind" if isinstance(error, TypeError) else str(error).split("\n")[0]
        raise EnvironmentOptionError(
            env_id, f"EnvPool cannot make it with {dict(options)}: {reason}"
        ) from error


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
