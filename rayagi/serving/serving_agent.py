"""The agent of a policy that serves: its mode, or samples as in training."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from actors.agent import Agent
from rayagi.algorithms.policy import NetworkPolicy
from rayagi.serving.program import ServingJob

_STEPS = 32
"""That noise is drawn for at a time."""


class ServingAgent:
    """Acts for a GMI's environments. Where it samples, each environment has noise of its own, whichever GMI draws it."""

    def __init__(
        self, job: ServingJob, policy: NetworkPolicy, *, num_envs: int, first_env_index: int
    ) -> None:
        self._agent, self._policy, self._greedy = Agent(policy), policy, job.greedy
        self._seed, self._num_envs, self._first_env_index = job.seed, num_envs, first_env_index
        self._block = 0
        self._noise: Iterator[Tensor] = iter(())

    def act(self, obs: Tensor) -> Tensor:
        """Actions (N, dim) or (N,) for raw observations (N, obs_dim), on the host."""
        if self._greedy:
            return self._agent.act_greedily(obs)
        _, _, actions = self._agent.act(obs, self._next_noise())
        return actions.cpu()

    def _next_noise(self) -> Tensor:
        """Of one step, (N, output_dim) float32, on the policy's device."""
        step = next(self._noise, None)
        if step is None:
            noise = self._policy.noise(
                _STEPS,
                self._num_envs,
                seed=self._seed,
                first_env_index=self._first_env_index,
                number=self._block,
            )
            self._block += 1
            self._noise = iter(noise.unbind(0))
            step = next(self._noise)
        return step
