"""IQL's step: expectile regression of V, temporal differences of Q, and advantage-weighted cloning (Kostrikov et al. 2021).

The three losses step different networks, so the gradient of their sum is one step of each (algorithm 1, in one all-reduce).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from actors.protocols import ActionSpec, StateDict
from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import GradientUpdater, on_host
from rayagi.algorithms.iql import IQLSpec
from rayagi.algorithms.offline_learner import TRANSITIONS, Batch, OneLossLearner
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import Model, mlp


class TwinCritic(nn.Module):
    """Two perceptrons Q_i(s, a) on vectors; choices are one-hot. Initial weights depend on ``seed`` alone."""

    def __init__(self, obs_dim: int, action: ActionSpec, network: NetworkSpec, seed: int) -> None:
        super().__init__()
        self._choices = (action.choices or (action.num_choices,)) if action.is_discrete else ()
        generator = torch.Generator().manual_seed(
            seed + 1
        )  # else the first one would begin as the policy does
        self.critics = nn.ModuleList(
            mlp(
                obs_dim + (sum(self._choices) or action.dim),
                network.hidden,
                1,
                network.activation,
                output_gain=1.0,
                generator=generator,
            )
            for _ in range(2)
        )

    def forward(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Q_1 and Q_2 of normalised observations (n, obs_dim) and actions of the environment: (2, n)."""
        if self._choices:
            chosen = actions.reshape(len(actions), -1).unbind(-1)
            parts = [one_hot(each, size) for each, size in zip(chosen, self._choices, strict=True)]
            actions = torch.cat(parts, -1).to(obs)
        inputs = torch.cat((obs, actions), -1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.critics])


class _Networks(nn.Module):
    """Policy, value network and critics: the parameters that are stepped."""

    def __init__(self, model: Model, critic: TwinCritic) -> None:
        super().__init__()
        self.model, self.critic = model, critic


class IQLUpdater(GradientUpdater[IQLSpec]):
    """Steps all networks at once. The policy's checkpoint is that of every algorithm; the critics are beside it."""

    def __init__(self, model: Model, critic: TwinCritic, spec: IQLSpec, communicator: Communicator) -> None:
        self.critic = critic
        self.policy_model = model
        super().__init__(_Networks(model, critic), spec, communicator)  # type: ignore[arg-type]
        self.target = copy.deepcopy(critic).requires_grad_(False)
        """Follows the critics; made after rank 0's parameters have arrived."""

    @torch.no_grad()
    def follow(self) -> None:
        """theta' = theta' + tau (theta - theta')."""
        for target, source in zip(self.target.parameters(), self.critic.parameters(), strict=True):
            target.lerp_(source, self.spec.tau)

    def state_dict(self) -> StateDict:
        """As of every updater, with the critics and their targets."""
        state = super().state_dict()
        return {
            **state,
            "model": on_host(self.policy_model.state_dict()),
            "critic": on_host(self.critic.state_dict()),
            "target": on_host(self.target.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place."""
        names = {f"model.{name}": value for name, value in state["model"].items()}
        names |= {f"critic.{name}": value for name, value in state["critic"].items()}
        super().load_state_dict({**state, "model": names})
        self.target.load_state_dict(state["target"])


class IQLLearner(OneLossLearner[IQLSpec]):
    """Learns a policy without ever evaluating an action that is not in the dataset."""

    updater: IQLUpdater
    measured = ("policy_loss", "value_loss", "q_loss", "target_q", "advantage_weight")
    subscriptions = TRANSITIONS

    def _make_updater(self) -> IQLUpdater:
        info = self.policy.info
        critic = TwinCritic(info.obs_dim, info.action, self.network, self.seed).to(self.policy.device)
        return IQLUpdater(self.policy.model, critic, self.spec, self.communicator)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of each timestep: L_V + L_Q + L_pi (n,), and the metrics of ``measured`` (n, 5)."""
        model, spec, critic = self.policy.model, self.spec, self.updater.critic
        obs, actions = batch["obs"], batch["action"]
        shown = model.head.environment_actions(actions)
        values = model.values(obs)
        with torch.no_grad():
            targets = self.updater.target(obs, shown).amin(0)
            next_values = model.values(batch["next_obs"])
            # y = r + gamma (1 - d) V(s')  (eq. 6).
            returns = batch["reward"] + spec.gamma * (1.0 - batch["terminated"].to(obs)) * next_values
        # L_V = |tau - 1(u < 0)| u^2 with u = min_i Q'_i(s, a) - V(s)  (eq. 5).
        gain = targets - values
        value_loss = (spec.expectile - (gain < 0).to(obs)).abs() * gain.square()
        # L_Q = sum_i (y - Q_i(s, a))^2  (eq. 6).
        q_loss = (returns - critic(obs, shown)).square().sum(0)
        # L_pi = -exp(beta (min_i Q'_i(s, a) - V(s))) log pi(a|s)  (eq. 7), the weight bounded.
        weight = (spec.inverse_temperature * gain.detach()).exp().clamp(max=spec.max_weight)
        policy_loss = -weight * model.head.log_prob(model.outputs(obs), actions)
        metrics = torch.stack((policy_loss, value_loss, q_loss, targets, weight), -1).detach()
        return policy_loss + value_loss + q_loss, metrics

    def after_step(self) -> None:
        """Move the target critics."""
        self.updater.follow()
