"""CleanRL's single-file PPO, the loop of ppo_continuous_action.py, on EnvPool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from experiments.peers.common import (
    BATCH,
    ENVS,
    EPOCHS,
    HIDDEN,
    MINIBATCH,
    STEPS,
    Meter,
    Pool,
    TimeUpError,
    flags,
)


def orthogonal(layer: nn.Linear, gain: float = 2**0.5) -> nn.Linear:
    """The layer with orthogonal weights and no bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """ELU between layers."""
    sizes, layers = [inputs, *HIDDEN], list[nn.Module]()
    for fan_in, fan_out in pairwise(sizes):
        layers += [orthogonal(nn.Linear(fan_in, fan_out)), nn.ELU()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(HIDDEN[-1], outputs), gain))


class Agent(nn.Module):
    """Separate policy and value networks."""

    def __init__(self, obs_dim: int, action_dim: int) -> None:
        super().__init__()
        self.actor, self.critic = network(obs_dim, action_dim, 0.01), network(obs_dim, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(1, action_dim))

    def value(self, obs: Tensor) -> Tensor:
        """(B, obs_dim) -> (B,)."""
        return self.critic(obs)[:, 0]

    def forward(self, obs: Tensor, actions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, sampled where none are given, their log probabilities, and values."""
        mean = self.actor(obs)
        normal = Normal(mean, self.log_std.expand_as(mean).exp(), validate_args=False)
        actions = normal.sample() if actions is None else actions
        return actions, normal.log_prob(actions).sum(1), self.value(obs)


class Loop:
    """Rollout and update."""

    def __init__(self, envs: Pool) -> None:
        self.envs, self.agent = envs, Agent(envs.obs_dim, envs.action_dim)
        self.optimiser = torch.optim.Adam(self.agent.parameters(), lr=3e-4, eps=1e-5)
        self.obs = torch.zeros(STEPS, ENVS, envs.obs_dim)
        self.actions = torch.zeros(STEPS, ENVS, envs.action_dim)
        self.log_probs, self.rewards, self.done, self.values = torch.zeros(4, STEPS, ENVS).unbind()
        self.now = torch.as_tensor(envs.reset())

    @torch.no_grad()
    def rollout(self) -> None:
        """Time limits are bootstrapped from the last real observation."""
        for t in range(STEPS):
            self.obs[t] = self.now
            self.actions[t], self.log_probs[t], self.values[t] = self.agent(self.now)
            obs, rewards, terminated, truncated, final = self.envs.step(self.actions[t].numpy())
            self.rewards[t] = torch.as_tensor(rewards)
            self.done[t] = torch.as_tensor(terminated | truncated)
            if truncated.any():
                at = np.flatnonzero(truncated)
                self.rewards[t, at] += 0.99 * self.agent.value(torch.as_tensor(final[at]))
            self.now = torch.as_tensor(obs)

    @torch.no_grad()
    def advantages(self) -> Tensor:
        """By generalised advantage estimation, (STEPS, ENVS)."""
        found, last, next_value = (
            torch.zeros_like(self.rewards),
            torch.zeros(ENVS),
            self.agent.value(self.now),
        )
        for t in reversed(range(STEPS)):
            live = 1 - self.done[t]
            error = self.rewards[t] + 0.99 * next_value * live - self.values[t]
            found[t] = last = error + 0.99 * 0.95 * live * last
            next_value = self.values[t]
        return found

    def minibatches(self) -> Iterator[tuple[Tensor, ...]]:
        """Of all epochs: observations, actions, log probabilities, advantages, value targets."""
        advantages = self.advantages()
        fields = (self.obs, self.actions, self.log_probs, advantages, advantages + self.values)
        flat = [field.flatten(0, 1) for field in fields]
        for _ in range(EPOCHS):
            for order in torch.randperm(BATCH).split(MINIBATCH):
                yield tuple(field[order] for field in flat)

    def update(self) -> None:
        """A step on each minibatch."""
        for obs, actions, log_probs, advantages, targets in self.minibatches():
            _, found, values = self.agent(obs, actions)
            ratio = (found - log_probs).exp()
            scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            policy_loss = torch.max(-scaled * ratio, -scaled * ratio.clamp(0.8, 1.2)).mean()
            loss = policy_loss + 0.5 * (values - targets).pow(2).mean()
            self.optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.agent.parameters(), 0.5)
            self.optimiser.step()


def main() -> None:
    """Command line."""
    given = flags("CleanRL")
    meter = Meter("cleanrl", given)
    loop = Loop(Pool(given, meter))
    try:
        while True:
            loop.rollout()
            loop.update()
            meter.iteration(loop.envs.steps)
    except TimeUpError:
        meter.report("own loop", "")


if __name__ == "__main__":
    main()
