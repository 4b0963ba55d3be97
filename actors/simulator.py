"""The simulator role: owns the environments, their current observations and the episodes' books."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.protocols import EnvInfo, RolloutEnv, StateDict, StepResult, VecEnv
from actors.rollout import Rollout


class Simulator:
    """Steps a batch of environments and counts their episodes."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.obs: Tensor = env.reset()
        self._returns = torch.zeros(env.num_envs, dtype=torch.float64)
        self._lengths = torch.zeros(env.num_envs, dtype=torch.int64)
        self.finished_returns: list[float] = []
        self.finished_lengths: list[int] = []

    @property
    def info(self) -> EnvInfo:
        """What the environments are."""
        return self.env.info

    @property
    def resumes_episodes(self) -> bool:
        """Whether a saved state goes on within its episodes."""
        return self.env.resumes_episodes

    def begin(self, iteration: int) -> None:
        """Nothing to wait for: the environments are here."""

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; ``actions`` on the host."""
        result = self.env.step(actions)
        self.obs = result.obs
        self._returns += result.rewards
        self._lengths += 1
        if len(result.final_ids):
            ids = result.final_ids
            self.finished_returns += self._returns[ids].tolist()
            self.finished_lengths += self._lengths[ids].tolist()
            self._returns[ids] = 0.0
            self._lengths[ids] = 0
        return result

    def fill(self, rollout: Rollout, policy: PolicyTensors, iteration: int) -> None:
        """A whole rollout at once, by environments that act, too (RolloutEnv); the same books as step by step."""
        assert isinstance(self.env, RolloutEnv)
        returns, lengths = self.env.fill(rollout, policy, iteration, self._returns)
        self.finished_returns += returns
        self.finished_lengths += lengths
        self.obs = rollout.last_obs.clone()
        ended = rollout.terminated | rollout.truncated
        since_last = ended.flip(0).to(torch.int64).argmax(0)
        self._lengths = torch.where(ended.any(0), since_last, self._lengths + rollout.num_steps)

    def take_finished(self) -> tuple[list[float], list[int]]:
        """Undiscounted returns and lengths of the episodes that ended since the last call."""
        finished = self.finished_returns, self.finished_lengths
        self.finished_returns, self.finished_lengths = [], []
        return finished

    def close(self) -> None:
        """Release the environments."""
        self.env.close()

    def state_dict(self) -> StateDict:
        """Environments, and the running episodes' returns and lengths."""
        return {
            "env": self.env.state_dict(),
            "returns": self._returns.clone(),
            "lengths": self._lengths.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; episodes that the environments cannot resume count from zero."""
        self.obs = self.env.load_state_dict(state["env"])
        if self.env.resumes_episodes:
            self._returns = state["returns"].clone()
            self._lengths = state["lengths"].clone()
        else:
            self._returns.zero_()
            self._lengths.zero_()
