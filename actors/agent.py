"""The agent role: policy inference and sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.protocols import Policy


class Agent:
    """Turns observations into actions with a policy; keeps nothing of its own."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @torch.inference_mode()
    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sampled actions.

        Args:
            obs: raw observations   (N, obs_dim)
            noise: exploration noise of this step   (N, output_dim)

        Returns:
            what the networks saw (N, obs_dim), distribution parameters (N, output_dim), actions (N, dim) or (N,).
        """
        observed = self.policy.observe(obs)
        outputs = self.policy.outputs(observed)
        return observed, outputs, self.policy.sample(outputs, noise)

    @torch.inference_mode()
    def act_greedily(self, obs: Tensor) -> Tensor:
        """The policy's mode, on the host."""
        return self.policy.mode(self.policy.outputs(self.policy.observe(obs))).cpu()
