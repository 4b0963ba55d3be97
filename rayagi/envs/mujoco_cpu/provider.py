"""EnvProvider of Gymnasium's MuJoCo v5 tasks on CPU cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs.mujoco_cpu.catalogue import TASKS, make_task
from rayagi.envs.mujoco_cpu.compiled_model import ENGINE, describe, load_model
from rayagi.envs.providers import VecEnvArgs, time_limit


class MujocoProvider:
    """Implements EnvProvider."""

    engines: tuple[str, ...] = (ENGINE,)

    def ids(self) -> Iterable[str]:
        """All ids of the catalogue."""
        return TASKS

    def knows(self, env_id: str) -> bool:
        """Whether the catalogue has it."""
        return env_id in TASKS

    def description(self, env_id: str) -> str:
        """The task's description."""
        return TASKS[env_id].description

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Check the options by making the task, without its model."""
        make_task(env_id, self._limit(env_id, kwargs)[1])

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """The EnvInfo, for which the model is compiled."""
        limit, options = self._limit(env_id, kwargs)
        task = make_task(env_id, options)
        return describe(env_id, load_model(env_id, task), task, limit)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Make the environments, which run on threads of this process."""
        # Imported here: it needs torch, which questions about a task do not.
        from rayagi.envs.mujoco_cpu.whole_rollouts.vec_env import make_vec_env

        limit, options = self._limit(env_id, kwargs)
        return make_vec_env(
            env_id,
            make_task(env_id, options),
            num_envs=env_args.num_envs,
            first_env_index=env_args.first_env_index,
            seed=env_args.seed,
            num_threads=env_args.num_threads,
            max_episode_steps=limit,
        )

    @staticmethod
    def _limit(env_id: str, kwargs: Mapping[str, Any]) -> tuple[int | None, dict[str, Any]]:
        return time_limit(env_id, kwargs, gymnasium.spec(env_id).max_episode_steps)
