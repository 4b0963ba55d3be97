"""Simulator role: owns the environments, their current observations, and the episode returns and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.protocols import EnvInfo, RolloutEnv, StateDict, StepResult, VecEnv
from actors.rollout import Rollout


class Simulator:
    """Steps a batch of environments and sums up their episodes' returns and lengths."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self.obs: Tensor = env.reset()
        self._returns = torch.zeros(env.num_envs, dtype=torch.float64)
        self._lengths = torch.zeros(env.num_envs, dtype=torch.int64)
        self.finished_returns: list[float] = []
        self.finished_lengths: list[int] = []
        terms = env.info.reward_terms
        self._terms = torch.zeros((env.num_envs, len(terms)), dtype=torch.float64)
        """Sums of the reward terms over the running episodes, (N, terms)."""
        self._finished_terms: dict[str, list[float]] = {name: [] for name in terms}
        self._sim_errors: dict[str, int] = {}

    @property
    def info(self) -> EnvInfo:
        """Description of the environments."""
        return self.env.info

    @property
    def resumes_episodes(self) -> bool:
        """Whether restoring a saved state continues its episodes."""
        return self.env.resumes_episodes

    def begin(self, iteration: int) -> None:
        """No-op: the environments are local."""

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; ``actions`` on the host."""
        result = self.env.step(actions)
        self.obs = result.obs
        self.count_step(result.rewards, result.final_ids, result.reward_terms)
        return result

    def count_step(self, rewards: Tensor, ended: Tensor, reward_terms: Tensor | None = None) -> None:
        """Add a step to the episode statistics.

        Args:
            rewards: of the step                                     (N,)
            ended: environments whose episodes ended                 (K,) int64
            reward_terms: of the step, by ``EnvInfo.reward_terms``   (N, terms)
        """
        self._returns += rewards
        if reward_terms is not None:
            self._terms += reward_terms
            if len(ended):
                for finished, sums in zip(
                    self._finished_terms.values(), self._terms[ended].T.tolist(), strict=True
                ):
                    finished.extend(sums)
                self._terms[ended] = 0.0
        self._lengths += 1
        if len(ended):
            self.finished_returns += self._returns[ended].tolist()
            self.finished_lengths += self._lengths[ended].tolist()
            self._returns[ended] = 0.0
            self._lengths[ended] = 0

    def collect_rollout(self, rollout: Rollout, policy: PolicyTensors, iteration: int) -> None:
        """Collect a whole rollout in one call of a RolloutEnv. Episode statistics are the same as step by step."""
        assert isinstance(self.env, RolloutEnv)
        returns, lengths = self.env.collect_rollout(rollout, policy, iteration, self._returns)
        self.finished_returns += returns
        self.finished_lengths += lengths
        self.obs = rollout.last_obs.clone()
        ended = rollout.terminated | rollout.truncated
        # Steps since the last episode end of each environment: index of the first True in reversed time.
        since_last = ended.flip(0).to(torch.int64).argmax(0)
        self._lengths = torch.where(ended.any(0), since_last, self._lengths + rollout.num_steps)

    def take_finished(self) -> tuple[list[float], list[int]]:
        """Undiscounted returns and lengths of the episodes that ended since the last call."""
        finished = self.finished_returns, self.finished_lengths
        self.finished_returns, self.finished_lengths = [], []
        return finished

    def take_reward_terms(self) -> dict[str, list[float]]:
        """Sums of the reward terms over the episodes that ended since the last call, by name."""
        finished = self._finished_terms
        self._finished_terms = {name: [] for name in finished}
        return finished

    def take_sim_errors(self) -> dict[str, float]:
        """Simulation errors since the last call, by metric; empty if the environments do not count them."""
        counted = dict(getattr(self.env, "sim_errors", {}))
        new = {name: count - self._sim_errors.get(name, 0) for name, count in counted.items()}
        self._sim_errors = counted
        return {f"faults_{name.replace(' ', '_')}": float(count) for name, count in new.items()}

    def close(self) -> None:
        """Release the environments."""
        self.env.close()

    def state_dict(self) -> StateDict:
        """Environments, and the running episodes' returns and lengths."""
        return {
            "env": self.env.state_dict(),
            "returns": self._returns.clone(),
            "lengths": self._lengths.clone(),
            "reward_terms": self._terms.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; episodes that the environments cannot resume count from zero."""
        self.obs = self.env.load_state_dict(state["env"])
        if self.env.resumes_episodes:
            self._returns = state["returns"].clone()
            self._lengths = state["lengths"].clone()
        else:
            self._returns.zero_()
            self._lengths.zero_()
        saved = state.get("reward_terms") if self.env.resumes_episodes else None
        if saved is not None and saved.shape == self._terms.shape:  # the task's terms may have changed
            self._terms = saved.clone()
        else:
            self._terms.zero_()
