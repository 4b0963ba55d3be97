"""EnvProvider protocol: a kind of environments with its ids, its engines and its constructor."""

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
    """Arguments of a VecEnv: N environments starting at a global index, the seed, and the threads they may use."""

    num_envs: int
    first_env_index: int
    seed: int
    num_threads: int


class EnvProvider(Protocol):
    """Environments of one kind."""

    engines: tuple[str, ...]
    """Engines that run them; the first is the default."""

    def ids(self) -> Iterable[str]:
        """Ids shown by ``rayagi envs``."""
        ...

    def knows(self, env_id: str) -> bool:
        """Whether the provider has an id, listed or not."""
        ...

    def description(self, env_id: str) -> str:
        """Description of a listed environment, in a few words."""
        ...

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Validate the options without simulating. Raises EnvironmentOptionError."""
        ...

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes and limits. Raises EnvError."""
        ...

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Construct the environments. Raises EnvError."""
        ...


def time_limit(
    env_id: str, kwargs: Mapping[str, Any], usual: int | None
) -> tuple[int | None, dict[str, Any]]:
    """The time limit (default ``usual``; option -1: none, as in ``gymnasium.make``), and the other options."""
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
    """Validate a task's options, which are its dataclass fields. Raises EnvironmentOptionError for an unknown one."""
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
    """Log the counts of simulation errors, for users without metrics."""
    if any(sim_errors.values()):
        counts = ", ".join(f"{count} {name}" for name, count in sim_errors.items() if count)
        _logger.warning("%s: simulation errors, whose worlds were reset: %s", env_id, counts)


def check_num_envs(env_id: str, saved: int, num_envs: int) -> None:
    """Raise EnvironmentOptionError if a saved state is of another number of environments."""
    if saved != num_envs:
        raise EnvironmentOptionError(
            env_id,
            f"the saved state holds {saved} environments, not {num_envs}; resume with num_envs={saved} per GMI",
        )
