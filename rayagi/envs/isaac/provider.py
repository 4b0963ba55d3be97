"""EnvProvider of Isaac Gym and Isaac Lab: ids such as ``isaacgym/Ant`` and ``isaaclab/Isaac-Ant-Direct-v0``."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from actors.protocols import ActionSpec, EnvInfo
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.isaac.process import SimulatorProcess
from rayagi.envs.isaac.vec_env import IsaacVecEnv, reset_seed
from rayagi.envs.providers import VecEnvArgs

OPTIONS: Mapping[str, tuple[str, ...]] = {"isaacgym": ("python",), "isaaclab": ("python", "clip_actions")}
"""python: interpreter of the simulator. clip_actions: action range, for tasks that do not define one."""


class IsaacProvider:
    """Implements EnvProvider. Lists no ids: only the simulator's Python knows its tasks. [unverified on GPU]"""

    def __init__(self, engine: str) -> None:
        self.engines: tuple[str, ...] = (engine,)
        self._engine = engine

    def ids(self) -> Iterable[str]:
        """None."""
        return ()

    def knows(self, env_id: str) -> bool:
        """Whether the id starts with the engine's name; an unknown task fails at construction."""
        return env_id.startswith(f"{self._engine}/")

    def description(self, env_id: str) -> str:
        """Empty, since no ids are listed."""
        return ""

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Validate the options, and check that the interpreter exists."""
        options = OPTIONS[self._engine]
        for name in kwargs:
            if name not in options:
                raise EnvironmentOptionError(
                    env_id, f"there is no option {name!r}; {self._engine} has {', '.join(options)}"
                )
        python = kwargs.get("python")
        if python is not None and shutil.which(str(python)) is None:
            raise EnvironmentOptionError(
                env_id, f"python={python} is no executable here; give the Python that has {self._engine}"
            )
        clip = kwargs.get("clip_actions", 1.0)
        if not isinstance(clip, int | float) or not 0 < clip < math.inf:
            raise EnvironmentOptionError(env_id, f"clip_actions is {clip!r}; it must be greater than 0")

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes from one environment, constructed once per process; this starts the simulator."""
        about = _asked(env_id, engine, kwargs.get("python"))
        return _described(env_id, engine, about, kwargs)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> IsaacVecEnv:
        """Construct the environments in a child process, which inherits the GMI's GPU slice."""
        process = SimulatorProcess(
            engine,
            _task(env_id),
            num_envs=env_args.num_envs,
            seed=reset_seed(env_args, 0),
            python=kwargs.get("python"),
        )
        return IsaacVecEnv(_described(env_id, engine, process.about, kwargs), process, env_args)


def _task(env_id: str) -> str:
    return env_id.partition("/")[2]


@functools.cache
def _asked(env_id: str, engine: str, python: str | None) -> Mapping[str, Any]:
    process = SimulatorProcess(engine, _task(env_id), num_envs=1, seed=0, python=python)
    process.close()
    return process.about


def _described(env_id: str, engine: str, about: Mapping[str, Any], kwargs: Mapping[str, Any]) -> EnvInfo:
    clip = kwargs.get("clip_actions", math.inf)
    action = ActionSpec(
        kind="continuous",
        dim=about["action_dim"],
        low=tuple(float(max(-clip, value)) for value in about["low"]),
        high=tuple(float(min(clip, value)) for value in about["high"]),
    )
    return EnvInfo(
        env_id=env_id,
        engine=engine,
        obs_dim=about["obs_dim"],
        action=action,
        max_episode_steps=about["max_episode_steps"],
    )
