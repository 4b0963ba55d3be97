"""One Gymnasium environment with flat observations; what its code returns is checked, and what it raises is named."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from placement.errors import counted
from rayagi.envs.errors import RETURNED, EnvironmentFailedError, NamedFailures, failure_text, wrong_return

_logger = logging.getLogger("rayagi.envs")


class CheckedEnv(gymnasium.Wrapper[NDArray[Any], Any, Any, Any]):
    """Flattens observations to (obs_dim,), as FlattenObservation does, into arrays of their own; leaves ``info`` out.

    ``reset`` and ``step`` raise EnvironmentFailedError for any exception of the environment's code, for an observation of
    another shape than its space, for a reward that is no number, and where values are missing.
    """

    def __init__(self, env_id: str, env: gymnasium.Env[Any, Any], env_index: int) -> None:
        """Wrap ``env``, whose global index over all GMIs is ``env_index``.

        Raises:
            NotImplementedError, ValueError: its observations cannot be flattened.
        """
        super().__init__(env)
        self._env_id, self._env_index, self._steps = env_id, env_index, 0
        self._space = space = env.observation_space
        self._dtype, self._shape = space.dtype, space.shape
        self._is_flat = isinstance(space, spaces.Box) and len(space.shape) == 1
        if not self._is_flat:
            self.observation_space = spaces.flatten_space(space)

    def reset(self, **kwargs: Any) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode."""
        self._steps = 0
        with NamedFailures(self._env_id, self._where):
            returned: Any = self.env.reset(**kwargs)
            self._check_values("reset", returned)
            obs, _ = returned
            return self._flat(obs), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Advance by one step."""
        self._steps += 1
        with NamedFailures(self._env_id, self._where):
            returned: Any = self.env.step(action)
            if type(returned) is not tuple or len(returned) != 5:
                self._check_values("step", returned)
            obs, reward, terminated, truncated, _ = returned
            # Not its info: Gymnasium packs that of all into arrays of the first one's shapes, and nobody reads it.
            ended = self._flag("terminated", terminated), self._flag("truncated", truncated)
            return self._flat(obs), self._number(reward), *ended, {}

    def close(self) -> None:
        """Close it. What its code raises is logged: nothing depends on it any more."""
        try:
            super().close()
        except (Exception, SystemExit) as error:
            _logger.warning("%s: its close() failed: %s", self._env_id, failure_text(error))

    def _check_values(self, method: str, returned: Any) -> None:
        """Refuse what has not the number of values that ``reset`` or ``step`` returns."""
        if not isinstance(returned, tuple | list):
            problem = wrong_return(
                method, "None" if returned is None else f"a value of type {type(returned).__name__}"
            )
        elif len(returned) != len(RETURNED[method]):
            problem = wrong_return(method, counted(len(returned), "value"))
        else:
            return
        raise EnvironmentFailedError(self._env_id, self._where(), problem)

    def _where(self) -> str:
        when = f"step {self._steps} of its episode" if self._steps else "reset"
        return f"environment {self._env_index}, {when}"

    def _flat(self, obs: Any) -> Any:
        if (
            self._is_flat
            and type(obs) is np.ndarray
            and obs.dtype == self._dtype
            and obs.shape == self._shape
        ):
            return obs.copy()
        problem = _shape_problem(self._space, obs, "the observation")
        if problem:
            raise EnvironmentFailedError(self._env_id, self._where(), problem)
        # A copy: an environment may use the same array in its next episode, when the last one's end is not yet read.
        return np.array(obs, self._space.dtype) if self._is_flat else spaces.flatten(self._space, obs)

    def _flag(self, name: str, value: Any) -> bool:
        if value is True or value is False:
            return value
        values = np.asarray(value)
        if values.size != 1 or values.dtype.kind not in "biu":
            problem = f"{name} is {_described(value)}; it must be one bool"
            raise EnvironmentFailedError(self._env_id, self._where(), problem)
        return bool(values.item())

    def _number(self, reward: Any) -> Any:
        if type(reward) is float or isinstance(reward, Real):  # to ask the abstract class takes longer
            return reward
        values = np.asarray(reward)
        if values.size != 1 or values.dtype.kind not in "biuf":
            problem = f"the reward is {_described(reward)}; it must be one number"
            raise EnvironmentFailedError(self._env_id, self._where(), problem)
        return values.item()


def _shape_problem(space: spaces.Space[Any], obs: Any, name: str) -> str:
    """How shape or kind of an observation differs from what its space says; empty if they do not."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping) or set(obs) != set(space.spaces):
            given = f"has the keys {', '.join(obs)}" if isinstance(obs, Mapping) else f"is {_described(obs)}"
            return f"{name} {given}; observation_space has the keys {', '.join(space.spaces)}"
        members = [(f"{name}[{key!r}]", member, obs[key]) for key, member in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        if not isinstance(obs, tuple | list) or len(obs) != len(space.spaces):
            return f"{name} is {_described(obs)}; observation_space is a tuple of {len(space.spaces)}"
        members = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(space.spaces, obs, strict=True))]
    else:
        return _leaf_problem(space, obs, name)
    return next(filter(None, (_shape_problem(part, own, own_name) for own_name, part, own in members)), "")


def _leaf_problem(space: spaces.Space[Any], obs: Any, name: str) -> str:
    if isinstance(space, spaces.Discrete):
        number = np.asarray(obs)
        fits = number.size == 1 and number.dtype.kind in "iu"
        fits = fits and space.start <= number.item() < space.start + space.n
        return "" if fits else f"{name} is {obs!r}; observation_space is {space}"
    if not isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return ""
    if np.shape(obs) != space.shape:
        return f"{name} is {_described(obs)}; observation_space has the shape {space.shape}"
    values, wanted = np.asarray(obs), space.dtype.kind
    if isinstance(space, spaces.MultiBinary):  # zeros and ones of any type
        fits = bool(np.isin(values, (0, 1)).all())
        return "" if fits else f"{name} is {values.tolist()}; observation_space is {space}"
    # Whole numbers may become reals; reals would be cut off.
    if values.dtype.kind not in ("biuf" if wanted == "f" else "biu"):
        return f"{name} has the dtype {values.dtype}; observation_space has {space.dtype}"
    if isinstance(space, spaces.MultiDiscrete):
        # Each sets one column of its own: what is out of range would set one of another choice.
        fits = bool(((values >= space.start) & (values < space.start + space.nvec)).all())
        return "" if fits else f"{name} is {values.tolist()}; observation_space is {space}"
    return _overflow(values, space.dtype, name) if wanted in "iu" and values.size else ""


def _overflow(values: NDArray[Any], dtype: np.dtype[Any], name: str) -> str:
    """Whole numbers beyond a type would become others."""
    if np.can_cast(values.dtype, dtype):
        return ""
    low, high, limits = int(values.min()), int(values.max()), np.iinfo(dtype)
    fits = limits.min <= low and high <= limits.max
    return "" if fits else f"{name} has values from {low} to {high}; observation_space has {dtype}"


def _described(value: Any) -> str:
    if value is None:
        return "None"
    return f"of type {type(value).__name__} and shape {np.shape(value)}"
