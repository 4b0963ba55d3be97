"""EnvProvider of EnvPool (an extra): native environments, stepped by a thread pool."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.protocols import EnvInfo, StepResult
from rayagi.envs.errors import EnvironmentOptionError, UnsupportedSpaceError
from rayagi.envs.gymnasium_adapter import (
    RestartingVecEnv,
    action_spec,
    float32_copy,
    observation_parts,
)
from rayagi.envs.lifetime import while_open
from rayagi.envs.providers import EnvProvider, VecEnvArgs, time_limit


class EnvPoolVecEnv(RestartingVecEnv):
    """Implements VecEnv on a synchronous pool.

    EnvPool resets an ended environment in the next step, which ignores the action and returns no reward of the task. Here a
    second call resets it in the same step, so that every step is one of the task. ``obs`` and ``final_obs`` are exact.

    Each environment has its own generator, seeded once from (seed, global index, episode) like Gymnasium's environments; the
    layout makes no difference. If an episode terminates in the last step before its time limit, EnvPool reports only
    truncation.

    An environment with a non-finite reward or observation terminates with a reward of 0 and the last finite observation. It
    is counted in ``sim_errors`` and reset.
    """

    def __init__(
        self, envpool: ModuleType, info: EnvInfo, options: Mapping[str, Any], env_args: VecEnvArgs
    ) -> None:
        super().__init__(info, env_args.num_envs, env_args.first_env_index)
        self._envpool, self._options, self._env_args = envpool, dict(options), env_args
        self._pool: Any = None
        self._first_choice = 0
        self._discrete = info.action.kind == "discrete"
        self._low, self._high = np.array(info.action.low), np.array(info.action.high)
        self._obs = torch.empty(0)

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode everywhere, in a new pool: EnvPool takes seeds only at construction."""
        self._close_pool()
        env_args = self._env_args
        seeds = [seed % 2**31 for seed in self._next_seeds(env_args.seed)]
        with warnings.catch_warnings(action="ignore"):  # Gymnasium's, on the precision of EnvPool's bounds
            self._pool = self._envpool.make(
                self.info.env_id,
                env_type="gymnasium",
                num_envs=env_args.num_envs,
                num_threads=min(env_args.num_threads, env_args.num_envs),
                seed=seeds,
                **self._options,
            )
            self._first_choice = int(getattr(self._pool.action_space, "start", 0))
            obs, _ = self._pool.reset()
        self._obs = self._first_observations(obs)
        return self._obs.clone()

    def _first_observations(self, observed: NDArray[Any], ids: NDArray[Any] | None = None) -> Tensor:
        """Flat, (n, obs_dim), of these environments (None: all). Raises EnvironmentFailedError if one is not finite."""
        obs = self._flat(observed)
        self._refuse_nonfinite_starts(obs.numpy(), ids)
        return obs

    def _flat(self, observed: NDArray[Any]) -> Tensor:
        """A copy, (n, obs_dim). What float32 cannot hold becomes infinite."""
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.array(observed.reshape(len(observed), -1), self.info.obs_dtype))

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; real actions are clipped to the action range.

        Raises:
            SimulationError: an action, or an episode's first observation, is not finite.
        """
        self._elapsed += 1
        given = actions.detach().cpu().numpy()
        if self._discrete:
            given = given.reshape(-1) + self._first_choice
        else:
            self._refuse_nonfinite_actions(given)
            given = np.clip(given, self._low, self._high)
        observed, rewards, terminated, truncated, _ = self._pool.step(given)
        # First float32: a larger float64 is infinite.
        obs, rewards = self._flat(observed), float32_copy(rewards).numpy()
        unstable = ~np.isfinite(rewards)
        if obs.is_floating_point():  # bytes of images are finite
            unstable |= ~np.isfinite(obs.numpy()).all(axis=1)
        if unstable.any():
            self._num_unstable += int(unstable.sum())
            rewards, terminated = np.where(unstable, 0.0, rewards), terminated | unstable
            obs[unstable] = self._obs[unstable]
        final_ids = np.flatnonzero(terminated | truncated)
        final_obs = obs[final_ids]
        if final_ids.size:
            begun, _ = self._pool.reset(final_ids.astype(np.int32))  # in the order of the ids
            obs[final_ids] = self._first_observations(begun, final_ids)
            self._elapsed[final_ids] = 0
            self._episode[final_ids] += 1
        self._obs = obs
        return StepResult(
            obs=obs.clone(),
            rewards=float32_copy(rewards),
            terminated=torch.tensor(terminated),
            truncated=torch.tensor(truncated),
            final_ids=torch.from_numpy(final_ids),
            final_obs=final_obs,
        )

    def _release(self) -> None:
        super()._release()
        self._close_pool()

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


ENGINE = "envpool"
_OURS = ("seed", "env_seed", "num_envs", "num_threads", "batch_size", "max_num_players")
"""Options that rayagi sets itself."""
_NO_LIMIT = int(np.iinfo(np.int32).max)


class EnvPoolProvider(EnvProvider):
    """Lists no ids: EnvPool has thousands."""

    def knows(self, env_id: str) -> bool:
        """Whether EnvPool has the id. Any, if it is not installed: the registry then says what to install."""
        return find_spec("envpool") is None or env_id in _envpool().list_all_envs()

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Check for options that rayagi sets; EnvPool validates the others in ``info``."""
        _options(env_id, kwargs)

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes from EnvPool's specification of the environment."""
        spec = _spec(env_id, _options(env_id, kwargs))
        with warnings.catch_warnings(action="ignore"):  # Gymnasium's, on the precision of EnvPool's bounds
            space, actions = spec.gymnasium_observation_space, spec.gymnasium_action_space
        if not isinstance(space, gymnasium.spaces.Box):
            raise UnsupportedSpaceError(
                env_id, f"{space} of observations", "use a task whose observation is a vector or an image"
            )
        (part,) = observation_parts(env_id, space)
        limit = int(spec.config.max_episode_steps)
        action = action_spec(env_id, actions)
        if action.kind == "multi_discrete":
            raise UnsupportedSpaceError(env_id, f"{actions} of actions", "use engine gymnasium")
        return EnvInfo(
            env_id=env_id,
            engine=ENGINE,
            obs_dim=part.size,
            action=action,
            obs_parts=(part,) if part.is_image else (),
            max_episode_steps=None if limit == _NO_LIMIT else limit,
            frames=_frames(spec.config),
        )

    def make(
        self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs
    ) -> EnvPoolVecEnv:
        """Construct the environments; they run on threads of this process."""
        info, options = self.info(env_id, engine, kwargs), _options(env_id, kwargs)
        return EnvPoolVecEnv(_envpool(), info, options, env_args)


def _spec(env_id: str, options: Mapping[str, Any]) -> Any:
    """EnvPool's specification of an environment."""
    envpool = _envpool()
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


def _frames(config: Any) -> int:
    """Frames that an observation stacks along its first dimension."""
    return max(int(getattr(config, name, 1)) for name in ("stack_num", "frame_stack"))


def _options(env_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Options passed to EnvPool, besides those that rayagi sets."""
    for name in kwargs:
        if name in _OURS:
            raise EnvironmentOptionError(env_id, f"{name} is set by rayagi; remove it from the options")
    limit, options = time_limit(env_id, kwargs, None)
    if "max_episode_steps" in kwargs:
        options["max_episode_steps"] = _NO_LIMIT if limit is None else limit
    return options


def _envpool() -> ModuleType:
    """The module envpool."""
    import envpool  # an extra

    return envpool
