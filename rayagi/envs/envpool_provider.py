"""EnvProvider of EnvPool (an extra): native environments, stepped by a thread pool."""

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
"""Options that rayagi sets itself."""
_NO_LIMIT = int(np.iinfo(np.int32).max)


class EnvPoolProvider:
    """Implements EnvProvider. Lists no ids: EnvPool has thousands."""

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
        """Empty, since no ids are listed."""
        return ""

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Check for options that rayagi sets; EnvPool validates the others in ``info``."""
        _options(env_id, kwargs)

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes from EnvPool's specification of the environment."""
        spec = _spec(env_id, _options(env_id, kwargs))
        with warnings.catch_warnings(action="ignore"):  # Gymnasium's, on the precision of EnvPool's bounds
            space, actions = spec.gymnasium_observation_space, spec.gymnasium_action_space
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise UnsupportedSpaceError(
                env_id, f"{space} of observations", "use a task whose observation is one flat Box"
            )
        limit = int(spec.config.max_episode_steps)
        action = action_spec(env_id, actions)
        if action.kind == "multi_discrete":
            raise UnsupportedSpaceError(env_id, f"{actions} of actions", "use engine gymnasium")
        return EnvInfo(
            env_id=env_id,
            engine=ENGINE,
            obs_dim=int(space.shape[0]),
            action=action,
            max_episode_steps=None if limit == _NO_LIMIT else limit,
        )

    def make(
        self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs
    ) -> EnvPoolVecEnv:
        """Construct the environments; they run on threads of this process."""
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
    """Options passed to EnvPool, besides those that rayagi sets."""
    for name in kwargs:
        if name in _OURS:
            raise EnvironmentOptionError(env_id, f"{name} is set by rayagi; remove it from the options")
    limit, options = time_limit(env_id, kwargs, None)
    if "max_episode_steps" in kwargs:
        options["max_episode_steps"] = _NO_LIMIT if limit is None else limit
    return options


def _envpool(env_id: str) -> ModuleType:
    """The module envpool, imported lazily. Raises EnvironmentOptionError if it is not installed."""
    if importlib.util.find_spec("envpool") is None:
        raise EnvironmentOptionError(
            env_id, "engine envpool is an extra that is not installed: pip install 'rayagi[envpool]'"
        )
    import envpool

    return envpool
