"""The serving agent. Acts by the policy's mode, or samples as in training."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from actors.agent import Agent
from actors.protocols import Acting, EnvInfo
from actors.rollout import Rollout
from rayagi.models.policy import NetworkPolicy
from rayagi.serving.program import ServingJob

_STEPS = 32
"""Steps of one block of noise."""


class ServingAgent:
    """Acts for a GMI's environments. The noise of an environment does not depend on the GMI that draws it."""

    def __init__(
        self, job: ServingJob, policy: NetworkPolicy, info: EnvInfo, *, num_envs: int, first_env_index: int
    ) -> None:
        self._agent, self._policy, self._greedy = Agent(policy), policy, job.greedy
        self._seed, self._num_envs, self._first_env_index = job.seed, num_envs, first_env_index
        self._rollout = _one_row(info, num_envs, policy.device)
        self._block, self._step = 0, _STEPS
        self._acting: Acting

    def act(self, obs: Tensor) -> Tensor:
        """Actions (N, dim) or (N,) for raw observations (N, obs_dim), on the host, valid until the next call."""
        # The mode needs no new noise: the first block is reused.
        if self._step == _STEPS and not (self._greedy and self._block):
            self._acting = self._agent.through(self._rollout, self._noise())
            self._block += 1
        self._step = self._step % _STEPS + 1
        return self._acting(self._step - 1, obs)

    def reset(self, ids: Tensor) -> None:
        """Begin new episodes in these environments, (K,) int64: a recurrent policy forgets the old ones."""
        self._agent.reset(ids)

    def _noise(self) -> Tensor:
        """Noise of a block of steps, (T, N, output_dim) float32, on the policy's device; zeros for the mode."""
        if self._greedy:
            return torch.zeros_like(self._rollout.outputs)
        return self._policy.noise(
            _STEPS,
            self._num_envs,
            seed=self._seed,
            first_env_index=self._first_env_index,
            number=self._block,
        )


def _one_row(info: EnvInfo, num_envs: int, device: torch.device) -> Rollout:
    """A rollout whose steps all share the memory of one step: earlier steps are not read again."""
    row = Rollout.allocate(1, num_envs, info, device)
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Tensor) and field.name != "last_obs":
            setattr(row, field.name, value.expand(_STEPS, *value.shape[1:]))
    return row
