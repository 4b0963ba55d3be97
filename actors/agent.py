"""Agent role: policy inference and action sampling."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from actors.protocols import Acting, Policy, StateDict
from actors.rollout import Rollout


class Agent:
    """Turns observations into actions with a policy. Holds the states of a recurrent one, of one set of environments."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._states: Tensor | None = None

    def states(self, num_envs: int, device: torch.device) -> Tensor:
        """The recurrent states to act with next, (N, state_dim); zeros at first.

        Raises:
            ValueError: the states are of another number of environments.
        """
        if self._states is None:
            self._states = torch.zeros((num_envs, self.policy.state_dim))
        self._states = self._states.to(device)
        if len(self._states) != num_envs:
            raise ValueError(f"the states are of {len(self._states)} environments, and {num_envs} act")
        return self._states

    @torch.inference_mode()
    def reset(self, ids: Tensor) -> None:
        """Forget the episodes of these environments, (K,) int64: they begin new ones."""
        if self._states is not None and len(ids):
            self._states[ids.to(self._states.device)] = 0.0

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
        outputs = self._outputs(observed)
        return observed, outputs, self.policy.sample(outputs, noise)

    def _outputs(self, observed: Tensor) -> Tensor:
        if not self.policy.state_dim:
            return self.policy.outputs(observed)
        outputs, self._states = self.policy.step(observed, self.states(len(observed), observed.device))
        return outputs

    def through(self, rollout: Rollout, noise: Tensor) -> Acting:
        """Act through ``rollout`` with the current policy; ``noise`` (T, N, output_dim) is on the policy's device."""
        return self.policy.acting(rollout, noise) or ActingByOperations(self, rollout, noise)

    @torch.inference_mode()
    def act_greedily(self, obs: Tensor) -> Tensor:
        """The policy's mode, as the environment receives it, on the host."""
        actions = self.policy.mode(self._outputs(self.policy.observe(obs)))
        return self.policy.environment_actions(actions).cpu()

    def state_dict(self) -> StateDict:
        """The recurrent states, if there are any."""
        return {} if self._states is None else {"states": self._states.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore saved states; an empty mapping: all episodes begin anew."""
        self._states = state["states"].clone() if "states" in state else None


class ActingByOperations:
    """Implements Acting with the policy's torch operations."""

    def __init__(self, agent: Agent, rollout: Rollout, noise: Tensor) -> None:
        self._agent, self._rollout = agent, rollout
        self._steps = list(zip(rollout.steps(), noise.unbind(0), strict=True))

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill step ``t``; returns the environment's actions on the host."""
        row, noise = self._steps[t]
        rollout = self._rollout
        if rollout.states is not None and t % rollout.sequence_length == 0:
            states = self._agent.states(rollout.num_envs, rollout.states.device)
            rollout.states[t // rollout.sequence_length].copy_(states)
        row.raw_obs.copy_(obs)
        observed, outputs, actions = self._agent.act(obs, noise)
        row.obs.copy_(observed)
        row.outputs.copy_(outputs)
        row.actions.copy_(actions)
        return self._agent.policy.environment_actions(actions).cpu()
