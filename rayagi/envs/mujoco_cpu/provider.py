"""EnvProvider of Gymnasium's MuJoCo v5 tasks on CPU cores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs.mujoco_cpu.tasks import (
    GymnasiumAnt,
    GymnasiumHumanoid,
    GymnasiumTask,
    HalfCheetah,
    Hopper,
    HumanoidStandup,
    InvertedDoublePendulum,
    InvertedPendulum,
    Pusher,
    Reacher,
    Swimmer,
    Walker2d,
    describe,
    load_model,
)
from rayagi.envs.providers import EnvProvider, VecEnvArgs, check_options, time_limit

TASKS: Mapping[str, type[GymnasiumTask]] = {
    "Ant-v5": GymnasiumAnt,
    "HalfCheetah-v5": HalfCheetah,
    "Hopper-v5": Hopper,
    "Humanoid-v5": GymnasiumHumanoid,
    "HumanoidStandup-v5": HumanoidStandup,
    "InvertedDoublePendulum-v5": InvertedDoublePendulum,
    "InvertedPendulum-v5": InvertedPendulum,
    "Pusher-v5": Pusher,
    "Reacher-v5": Reacher,
    "Swimmer-v5": Swimmer,
    "Walker2d-v5": Walker2d,
}


def make_task(env_id: str, options: Mapping[str, Any]) -> GymnasiumTask:
    """Make a task from Gymnasium's constructor arguments. Raises EnvironmentOptionError for an unknown one."""
    task_class = TASKS[env_id]
    check_options(env_id, task_class, options)
    # Configuration files give lists where Gymnasium's signatures have tuples.
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return task_class(**values)


class MujocoProvider(EnvProvider):
    """Tasks of the catalogue."""

    catalogue = TASKS

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
        from rayagi.envs.mujoco_cpu.vec_env import make_vec_env

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
