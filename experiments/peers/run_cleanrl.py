"""CleanRL's single-file PPO, the loop of ppo_continuous_action.py (ppo_atari.py's heads for choices), on EnvPool."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from experiments.peers.common import (
    BATCH,
    ENVS,
    EPOCHS,
    MINIBATCH,
    STEPS,
    Meter,
    Pool,
    TimeUpError,
    flags,
)
from experiments.peers.common import network as common_network


def network(obs_shape: tuple[int, ...], outputs: int, gain: float) -> nn.Module:
    """With orthogonal weights and no biases."""
    found = common_network(obs_shape, outputs)
    layers = [each for each in found.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return found


class Agent(nn.Module):
    """Separate policy and value networks."""

    def __init__(self, envs: Pool) -> None:
        super().__init__()
        self.actor = network(envs.obs_shape, envs.outputs, 0.01)
        self.critic = network(envs.obs_shape, 1, 1.0)
        self.log_std = None if envs.is_discrete else nn.Parameter(torch.zeros(1, envs.outputs))

    def value(self, obs: Tensor) -> Tensor:
        """(B, *obs_shape) -> (B,)."""
        return self.critic(obs)[:, 0]

    def forward(self, obs: Tensor, actions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, sampled where none are given, their log probabilities, and values."""
        mean = self.actor(obs)
        if self.log_std is None:
            choices = Categorical(logits=mean, validate_args=False)
            actions = choices.sample() if actions is None else actions
            return actions, choices.log_prob(actions), self.value(obs)
        normal = Normal(mean, self.log_std.expand_as(mean).exp(), validate_args=False)
        actions = normal.sample() if actions is None else actions
        return actions, normal.log_prob(actions).sum(1), self.value(obs)


class Loop:
    """Rollout and update."""

    def __init__(self, envs: Pool) -> None:
        self.envs, self.agent = envs, Agent(envs)
        self.optimiser = torch.optim.Adam(self.agent.parameters(), lr=3e-4, eps=1e-5)
        self.now = torch.as_tensor(envs.reset())
        self.obs = torch.zeros(STEPS, *self.now.shape, dtype=self.now.dtype)
        self.actions = torch.zeros(STEPS, ENVS, *envs.actions.shape)
        self.log_probs, self.rewards, self.done, self.values = torch.zeros(4, STEPS, ENVS).unbind()

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
