"""What a kind of environments says of itself: which ids it has, on which engines they run, how they are made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs.errors import EnvironmentOptionError

_logger = logging.getLogger("rayagi.envs")


@dataclass(frozen=True, slots=True)
class VecEnvArgs:
    """Where N environments stand: in the order of all GMIs' environments, and in what their process may use."""

    num_envs: int
    first_env_index: int
    seed: int
    num_threads: int


class EnvProvider(Protocol):
    """Environments of one kind."""

    engines: tuple[str, ...]
    """What runs them; the first is the usual one."""

    def ids(self) -> Iterable[str]:
        """The ids that are listed."""
        ...

    def knows(self, env_id: str) -> bool:
        """Whether it has an id, listed or not."""
        ...

    def description(self, env_id: str) -> str:
        """What a listed environment is, in a few words."""
        ...

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Look at the options without simulating anything. Raises EnvironmentOptionError."""
        ...

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes and limits. Raises EnvError."""
        ...

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """The environments. Raises EnvError."""
        ...


def time_limit(
    env_id: str, kwargs: Mapping[str, Any], usual: int | None
) -> tuple[int | None, dict[str, Any]]:
    """The time limit, usual or asked for (-1: none, as in ``gymnasium.make``), and the other options."""
    options = dict(kwargs)
    limit = options.pop("max_episode_steps", None)
    if limit is None:
        return usual, options
    if not isinstance(limit, int) or (limit < 1 and limit != -1):
        raise EnvironmentOptionError(
            env_id, f"max_episode_steps is {limit!r}; it must be a positive integer, or -1 for no limit"
        )
    return (None if limit == -1 else limit), options


def check_options(env_id: str, task_class: type[Any], options: Mapping[str, Any]) -> None:
    """Look at a task's options, which are its class's fields. Raises EnvironmentOptionError for one that it lacks."""
    known = [field.name for field in fields(task_class)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise EnvironmentOptionError(
            env_id, f"there is no option {', '.join(unknown)}; it has max_episode_steps, {', '.join(known)}"
        )
    frame_skip = options.get("frame_skip", 1)
    if not isinstance(frame_skip, int) or frame_skip < 1:
        raise EnvironmentOptionError(env_id, f"frame_skip is {frame_skip!r}; it must be a positive integer")


def log_sim_errors(env_id: str, sim_errors: Mapping[str, int]) -> None:
    """Log what went wrong in simulations, for those who have no metrics to look at."""
    if any(sim_errors.values()):
        counts = ", ".join(f"{count} {name}" for name, count in sim_errors.items() if count)
        _logger.warning("%s: faults in worlds, which began anew: %s", env_id, counts)


def check_num_envs(env_id: str, saved: int, num_envs: int) -> None:
    """Raise EnvironmentOptionError where a saved state is of another number of environments."""
    if saved != num_envs:
        raise EnvironmentOptionError(
            env_id,
            f"the saved state holds {saved} environments, not {num_envs}; resume with num_envs={saved} per GMI",
        )
