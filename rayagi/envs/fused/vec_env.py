"""VecEnv and RolloutEnv of fused simulators: one step at a time, or whole rollouts in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.protocols import EnvInfo, StateDict, StepResult
from actors.rollout import Episodes, Rollout
from rayagi.envs.errors import SimulationError
from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, FusedBackend, StepBatch
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.rollout import FusedRollout
from rayagi.envs.providers import check_num_envs


class BackendVecEnv:
    """Implements VecEnv for any backend on the host. Actions are clipped to the box."""

    resumes_episodes = True

    def __init__(self, info: EnvInfo, env_config: EnvConfig, backend: FusedBackend) -> None:
        self.info, self.num_envs = info, env_config.num_envs
        self._env_config, self._backend = env_config, backend
        self._out = StepBatch.allocate(1, env_config.num_envs, info.obs_dim)

    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        self._backend.start()
        return self._rows(self._backend.observe())

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment.

        Raises:
            SimulationError: an action is not finite, or what the simulator makes of it.
        """
        continuous, elapsed = self.info.action.kind == "continuous", self._backend.env_state.elapsed.clone()
        given = actions.detach().to("cpu", torch.float32 if continuous else torch.int64)
        if continuous:
            self._check_finite("the action", given, elapsed)
        out = self._out
        self._backend.run(given.unsqueeze(0), out)
        ids = (out.terminated[0] | out.truncated[0]).nonzero().flatten()
        obs = self._rows(out.obs[0])
        self._check_finite("an observation", obs, elapsed)
        self._check_finite("the reward", out.rewards[0], elapsed)
        return StepResult(
            obs=obs,
            rewards=out.rewards[0].clone(),
            terminated=out.terminated[0].clone(),
            truncated=out.truncated[0].clone(),
            final_ids=ids,
            final_obs=self._rows(out.final_obs[0][:, ids]),
        )

    def state_dict(self) -> StateDict:
        """State, elapsed steps and number of every running episode."""
        env_state = self._backend.env_state
        return {
            "state": env_state.state.clone(),
            "elapsed": env_state.elapsed.clone(),
            "episode": env_state.episode.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Continue the saved episodes of as many environments."""
        check_num_envs(self.info.env_id, len(state["elapsed"]), self.num_envs)
        self._backend.env_state.copy_(BatchedEnvState(state["state"], state["elapsed"], state["episode"]))
        return self._rows(self._backend.observe())

    def close(self) -> None:
        """Nothing to release."""

    def _check_finite(self, quantity: str, values: Tensor, elapsed: Tensor) -> None:
        """Raise SimulationError at the first environment of which a value (N, ...) is not finite."""
        if not torch.isfinite(values.sum()):  # one cheap sum detects any; finite values may overflow it
            bad = (~torch.isfinite(values)).nonzero()
            if len(bad):
                env = int(bad[0, 0])
                raise SimulationError(self._env_config.first_env_index + env, int(elapsed[env]) + 1, quantity)

    @staticmethod
    def _rows(columns: Tensor) -> Tensor:
        """(N, D) of (D, N), in memory of its own: the transpose of a single environment would be a view."""
        return columns.t().clone(memory_format=torch.contiguous_format)


class FusedVecEnv(BackendVecEnv):
    """Implements RolloutEnv: the C backend, whose kernel also runs the policy."""

    _backend: CBackend

    def __init__(self, info: EnvInfo, env_config: EnvConfig, num_threads: int) -> None:
        super().__init__(info, env_config, CBackend(env_config, num_threads))
        self._rollout = FusedRollout(self._backend)

    def collect_rollout(
        self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor
    ) -> Episodes:
        """T steps in one call: see RolloutEnv."""
        return self._rollout.collect_rollout(rollout, policy, iteration, running)

    def close(self) -> None:
        """End the threads."""
        self._backend.close()
