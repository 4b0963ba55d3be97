"""EnvProvider of Isaac Gym and Isaac Lab: ids such as ``isaacgym/Ant`` and ``isaaclab/Isaac-Ant-Direct-v0``."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.protocols import ActionSpec, EnvInfo, StateDict, StepResult
from rayagi.envs.errors import EnvironmentOptionError
from rayagi.envs.isaac.process import SimulatorProcess
from rayagi.envs.lifetime import ClosableEnv, while_open
from rayagi.envs.providers import EnvProvider, VecEnvArgs, check_num_envs, refuse_nonfinite


class IsaacVecEnv(ClosableEnv):
    """Implements VecEnv as far as the engine allows. Actions are clipped to the action range.

    Isaac Gym: ``final_obs`` is exact, but ``obs`` equals it where an episode ended. The new episode's first observation
    comes one step later, as for every trainer on Isaac Gym. That step is the engine's reset, and the episode's first.

    Isaac Lab: ``obs`` is exact, but ``final_obs`` is the previous observation, since the engine discards the last one. So a
    truncated episode bootstraps from the value one step before its end.

    Random numbers are the simulator's, seeded from (seed, first environment, number of the reset), so by layout.
    """

    resumes_episodes = False

    def __init__(self, info: EnvInfo, process: SimulatorProcess, env_args: VecEnvArgs) -> None:
        super().__init__()
        self.info, self.num_envs = info, env_args.num_envs
        self._process, self._env_args = process, env_args
        self._low, self._high = torch.tensor(info.action.low), torch.tensor(info.action.high)
        self._elapsed = torch.zeros(env_args.num_envs, dtype=torch.int64)
        self._resets = 0

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        seed = reset_seed(self._env_args, self._resets)
        self._resets += 1
        self._elapsed.zero_()
        return self._process.reset(seed)["obs"].clone()

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment.

        Raises:
            SimulationError: an action is not finite.
            SimulatorLostError: the simulator failed, exited or does not respond.
        """
        self._elapsed += 1
        refuse_nonfinite(actions, "action", self._env_args.first_env_index, self._elapsed)
        self._process.tensors["actions"].copy_(torch.clamp(actions.detach().cpu(), self._low, self._high))
        shared = self._process.step()
        terminated, truncated = shared["terminated"].bool(), shared["truncated"].bool()
        final_ids = (terminated | truncated).nonzero().squeeze(-1)
        self._elapsed[final_ids] = 0
        return StepResult(
            obs=shared["obs"].clone(),
            rewards=shared["rewards"].clone(),
            terminated=terminated,
            truncated=truncated,
            final_ids=final_ids,
            final_obs=shared["final_obs"][final_ids],
        )

    @while_open
    def state_dict(self) -> StateDict:
        """Number of resets; the simulators do not expose their state."""
        return {"resets": self._resets, "num_envs": self.num_envs}

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Start new episodes with seeds other than the saved ones. Returns their first observation."""
        check_num_envs(self.info.env_id, int(state["num_envs"]), self.num_envs)
        self._resets = int(state["resets"])
        return self.reset()

    def _release(self) -> None:
        self._process.close()


def reset_seed(env_args: VecEnvArgs, number: int) -> int:
    """31-bit seed of a reset, different for each GMI."""
    words = [env_args.seed % 2**64, env_args.first_env_index, number]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] >> 1)


OPTIONS: Mapping[str, tuple[str, ...]] = {"isaacgym": ("python",), "isaaclab": ("python", "clip_actions")}
"""python: interpreter of the simulator. clip_actions: action range, for tasks that do not define one."""


class IsaacProvider(EnvProvider):
    """Lists no ids: only the simulator's Python knows its tasks. [unverified on GPU]"""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def knows(self, env_id: str) -> bool:
        """Whether the id starts with the engine's name; an unknown task fails at construction."""
        return env_id.startswith(f"{self._engine}/")

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
