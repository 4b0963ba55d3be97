"""Agent role: policy inference and action sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.protocols import Acting, Policy
from actors.rollout import Rollout


class Agent:
    """Turns observations into actions with a policy. Stateless."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.inference_mode()
    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled actions.

        Args:
            obs: raw observations   (N, obs_dim)
            noise: exploration noise of this step   (N, output_dim)

        Returns:
            normalised observations (N, obs_dim), distribution parameters (N, output_dim), actions (N, dim) or (N,).
        """
        observed = self.policy.observe(obs)
        outputs = self.policy.outputs(observed)
        return observed, outputs, self.policy.sample(outputs, noise)

    def through(self, rollout: Rollout, noise: Tensor) -> Acting:
        """Act through ``rollout`` with the current policy; ``noise`` (T, N, output_dim) is on the policy's device."""
        return self.policy.acting(rollout, noise) or ActingByOperations(self, rollout, noise)

    @torch.inference_mode()
    def act_greedily(self, obs: Tensor) -> Tensor:
        """The policy's mode, on the host."""
        return self.policy.mode(self.policy.outputs(self.policy.observe(obs))).cpu()


class ActingByOperations:
    """Implements Acting with the policy's torch operations."""

    def __init__(self, agent: Agent, rollout: Rollout, noise: Tensor) -> None:
        self._agent = agent
        self._steps = list(zip(rollout.steps(), noise.unbind(0), strict=True))

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill step ``t``; returns the actions on the host."""
        row, noise = self._steps[t]
        row.raw_obs.copy_(obs)
        observed, outputs, actions = self._agent.act(obs, noise)
        row.obs.copy_(observed)
        row.outputs.copy_(outputs)
        row.actions.copy_(actions)
        return actions.cpu()
