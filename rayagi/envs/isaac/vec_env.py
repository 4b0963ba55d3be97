"""VecEnv adapter of an Isaac simulator in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.protocols import EnvInfo, StateDict, StepResult
from rayagi.envs.errors import SimulationError
from rayagi.envs.isaac.process import SimulatorProcess
from rayagi.envs.providers import VecEnvArgs, check_num_envs


class IsaacVecEnv:
    """Implements VecEnv as far as the engine allows. Actions are clipped to the action range.

    Isaac Gym: ``final_obs`` is exact, but ``obs`` equals it where an episode ended. The new episode's first observation
    comes one step later, as for every trainer on Isaac Gym. That step is the engine's reset, and the episode's first.

    Isaac Lab: ``obs`` is exact, but ``final_obs`` is the previous observation, since the engine discards the last one. So a
    truncated episode bootstraps from the value one step before its end.

    Random numbers are the simulator's, seeded from (seed, first environment, number of the reset), so by layout.
    """

    resumes_episodes = False

    def __init__(self, info: EnvInfo, process: SimulatorProcess, env_args: VecEnvArgs) -> None:
        self.info, self.num_envs = info, env_args.num_envs
        self._process, self._env_args = process, env_args
        self._low, self._high = torch.tensor(info.action.low), torch.tensor(info.action.high)
        self._elapsed = torch.zeros(env_args.num_envs, dtype=torch.int64)
        self._resets = 0

    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        seed = reset_seed(self._env_args, self._resets)
        self._resets += 1
        self._elapsed.zero_()
        return self._process.reset(seed)["obs"].clone()

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment.

        Raises:
            SimulationError: an action is not finite.
            SimulatorLostError: the simulator failed, exited or does not respond.
        """
        self._elapsed += 1
        self._check_finite(actions)
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

    def _check_finite(self, actions: Tensor) -> None:
        if not torch.isfinite(actions.sum()):
            bad = (~torch.isfinite(actions)).any(-1).nonzero()
            if len(bad):
                row = int(bad[0])
                raise SimulationError(self._env_args.first_env_index + row, int(self._elapsed[row]), "action")

    def state_dict(self) -> StateDict:
        """Number of resets; the simulators do not expose their state."""
        return {"resets": self._resets, "num_envs": self.num_envs}

    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Start new episodes with seeds other than the saved ones. Returns their first observation."""
        check_num_envs(self.info.env_id, int(state["num_envs"]), self.num_envs)
        self._resets = int(state["resets"])
        return self.reset()

    def close(self) -> None:
        """Terminate the simulator's process."""
        self._process.close()


def reset_seed(env_args: VecEnvArgs, number: int) -> int:
    """31-bit seed of a reset, different for each GMI."""
    words = [env_args.seed % 2**64, env_args.first_env_index, number]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] >> 1)
