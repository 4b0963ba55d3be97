"""CleanRL's loops of sac_continuous_action.py and ppo_continuous_action.py, with its settings: no step of the library's is
left out. They run in the virtual environment of experiments/peers/setup.sh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import gymnasium
import numpy as np
import torch
from gymnasium import wrappers
from torch import Tensor, nn
from torch.distributions import Normal

START, BATCH, CAPACITY, GAMMA, TAU = 5_000, 256, 1_000_000, 0.99, 0.005
"""Of SAC."""
STEPS, MINIBATCHES, EPOCHS, TOTAL = 2048, 32, 10, 1_000_000
"""Of PPO: steps of a rollout, minibatches and epochs of an update, steps after which the step size is 0."""

Act = Callable[[np.ndarray], np.ndarray]


class Ticking(Protocol):
    """Called after every environment step; raises where the training time is over."""

    def tick(self, steps: int, act: Act) -> None:
        """``act``: observations to the policy's modes."""


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of 256 with ReLU."""
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
    )


class Sac:
    """SAC: two critics and their targets, a squashed Gaussian policy, an automatic temperature."""

    def __init__(self, env: gymnasium.Env, seed: int) -> None:
        self.env, self.rng = env, np.random.default_rng(seed)
        box = env.action_space
        assert isinstance(box, gymnasium.spaces.Box)
        obs_dim, self.dim = env.observation_space.shape[0], box.shape[0]
        self.scale = torch.as_tensor((box.high - box.low) / 2, dtype=torch.float32)
        self.bias = torch.as_tensor((box.high + box.low) / 2, dtype=torch.float32)
        self.actor = network(obs_dim, 2 * self.dim)
        self.critics, self.targets = (
            nn.ModuleList(network(obs_dim + self.dim, 1) for _ in range(2)) for _ in range(2)
        )
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.critic_steps = torch.optim.Adam(self.critics.parameters(), lr=1e-3)
        self.actor_steps = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.alpha_steps = torch.optim.Adam([self.log_alpha], lr=1e-3)
        width = 2 * obs_dim + self.dim + 2
        self.rows = np.zeros((CAPACITY, width), np.float32)
        self.cuts = (obs_dim, self.dim, 1, 1, obs_dim)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Squashed Gaussian actions, and their log probabilities (B, 1)."""
        mean, log_std = self.actor(obs).chunk(2, -1)
        log_std = -5 + 0.5 * 7 * (log_std.tanh() + 1)
        normal = Normal(mean, log_std.exp())
        drawn = normal.rsample()
        squashed = drawn.tanh()
        log_prob = normal.log_prob(drawn) - (self.scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.scale + self.bias, log_prob.sum(1, keepdim=True)

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """The policy's mode."""
        mean, _ = self.actor(torch.as_tensor(obs, dtype=torch.float32)).chunk(2, -1)
        return (mean.tanh() * self.scale + self.bias).numpy()

    def _values(self, critics: nn.ModuleList, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (critic(torch.cat((obs, actions), 1)) for critic in critics)
        return first, second

    def update(self, count: int, number: int) -> None:
        """One step of the critics; every other time, two of the actor and the temperature."""
        drawn = torch.from_numpy(self.rows[self.rng.integers(0, count, BATCH)])
        obs, actions, rewards, terminated, next_obs = drawn.split(self.cuts, 1)
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, log_prob = self.sample(next_obs)
            least = torch.min(*self._values(self.targets, next_obs, next_actions)) - alpha * log_prob
            target = rewards + GAMMA * (1 - terminated) * least
        loss = sum((found - target).square().mean() for found in self._values(self.critics, obs, actions))
        self._step(self.critic_steps, loss)
        for _ in range(2 if number % 2 == 0 else 0):
            new, log_prob = self.sample(obs)
            alpha = self.log_alpha.exp().detach()
            self._step(
                self.actor_steps, (alpha * log_prob - torch.min(*self._values(self.critics, obs, new))).mean()
            )
            with torch.no_grad():
                _, log_prob = self.sample(obs)
            self._step(self.alpha_steps, (-self.log_alpha.exp() * (log_prob - self.dim)).mean())
        with torch.no_grad():
            for target, own in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.copy_(TAU * own + (1 - TAU) * target)

    def _step(self, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def explore(self, obs: np.ndarray, steps: int) -> np.ndarray:
        """Uniform actions before training starts, then the policy's."""
        if steps < START:
            return self.env.action_space.sample()
        with torch.no_grad():
            return self.sample(torch.as_tensor(obs, dtype=torch.float32).unsqueeze(0))[0][0].numpy()


def train_sac(task: str, seed: int, clock: Ticking) -> None:
    """Until the clock raises."""
    env = gymnasium.make(task)
    env.action_space.seed(seed)
    loop = Sac(env, seed)
    obs, _ = env.reset(seed=seed)
    steps = 0
    while True:
        action = loop.explore(obs, steps)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        loop.rows[steps % CAPACITY] = np.concatenate((obs, action, [reward, terminated], next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs
        steps += 1
        if steps > START:
            loop.update(min(steps, CAPACITY), steps)
        clock.tick(steps, loop.act)


def orthogonal(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """A layer with orthogonal weights and no bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def tanh_network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64."""
    return nn.Sequential(
        orthogonal(inputs, 64), nn.Tanh(), orthogonal(64, 64), nn.Tanh(), orthogonal(64, outputs, gain)
    )


class Ppo:
    """PPO: one environment, normalised observations and rewards, clipped value loss, a step size that falls to 0."""

    def __init__(self, task: str) -> None:
        env = wrappers.ClipAction(gymnasium.make(task))
        self.normalised = wrappers.NormalizeObservation(env)
        env = wrappers.TransformObservation(
            self.normalised, lambda obs: np.clip(obs, -10, 10), self.normalised.observation_space
        )
        env = wrappers.NormalizeReward(env, gamma=GAMMA)
        self.env = wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))
        obs_dim, self.box = env.observation_space.shape[0], gymnasium.make(task).action_space
        dim = self.box.shape[0]
        self.actor, self.critic = tanh_network(obs_dim, dim, 0.01), tanh_network(obs_dim, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(dim))
        self.parameters = [*self.actor.parameters(), *self.critic.parameters(), self.log_std]
        self.optimiser = torch.optim.Adam(self.parameters, lr=3e-4, eps=1e-5)
        self.obs, self.actions = torch.zeros(STEPS, obs_dim), torch.zeros(STEPS, dim)
        self.log_probs, self.rewards, self.values, self.ended = torch.zeros(4, STEPS).unbind()

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """The policy's mode, for raw observations (N, obs_dim)."""
        rms = self.normalised.obs_rms
        scaled = np.clip((obs - rms.mean) / np.sqrt(rms.var + 1e-8), -10, 10)
        actions = self.actor(torch.as_tensor(scaled, dtype=torch.float32)).numpy()
        return np.clip(actions, self.box.low, self.box.high)

    def policy(self, obs: Tensor) -> Normal:
        """Of normalised observations."""
        mean = self.actor(obs)
        return Normal(mean, self.log_std.exp().expand_as(mean))

    @torch.no_grad()
    def step(self, t: int, obs: Tensor, ended: bool) -> tuple[Tensor, bool]:
        """One environment step, recorded as number ``t``. ``ended``: whether ``obs`` begins an episode."""
        policy = self.policy(obs)
        action = policy.sample()
        self.obs[t], self.actions[t], self.ended[t] = obs, action, float(ended)
        self.log_probs[t], self.values[t] = policy.log_prob(action).sum(), self.critic(obs)[0]
        found, self.rewards[t], terminated, truncated, _ = self.env.step(action.numpy())
        over = bool(terminated or truncated)
        return torch.as_tensor(self.env.reset()[0] if over else found, dtype=torch.float32), over

    @torch.no_grad()
    def advantages(self, obs: Tensor, ended: bool) -> Tensor:
        """By generalised advantage estimation with lambda 0.95; an episode that was cut off counts as ended."""
        found, last = torch.zeros(STEPS), torch.zeros(())
        values, ends = [*self.values, self.critic(obs)[0]], [*self.ended, torch.tensor(float(ended))]
        for t in reversed(range(STEPS)):
            live = 1 - ends[t + 1]
            error = self.rewards[t] + GAMMA * values[t + 1] * live - self.values[t]
            found[t] = last = error + GAMMA * 0.95 * live * last
        return found

    def minibatches(self, advantages: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Of all epochs: observations, actions, log probabilities, values, advantages, value targets."""
        targets = advantages + self.values
        fields = (self.obs, self.actions, self.log_probs, self.values, advantages, targets)
        for _ in range(EPOCHS):
            for order in torch.randperm(STEPS).split(STEPS // MINIBATCHES):
                yield tuple(field[order] for field in fields)

    def update(self, advantages: Tensor, steps: int) -> None:
        """A step on each minibatch. ``steps``: of the environment before this rollout."""
        self.optimiser.param_groups[0]["lr"] = 3e-4 * max(0.0, 1 - steps / TOTAL)
        for obs, actions, log_probs, values, advantage, targets in self.minibatches(advantages):
            ratio = (self.policy(obs).log_prob(actions).sum(1) - log_probs).exp()
            scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy_loss = torch.max(-scaled * ratio, -scaled * ratio.clamp(0.8, 1.2)).mean()
            new = self.critic(obs)[:, 0]
            clipped = values + (new - values).clamp(-0.2, 0.2)
            value_loss = 0.5 * torch.max((new - targets).square(), (clipped - targets).square()).mean()
            self.optimiser.zero_grad()
            (policy_loss + 0.5 * value_loss).backward()
            nn.utils.clip_grad_norm_(self.parameters, 0.5)
            self.optimiser.step()


def train_ppo(task: str, seed: int, clock: Ticking) -> None:
    """Until the clock raises."""
    loop = Ppo(task)
    loop.env.action_space.seed(seed)
    obs, ended, steps = torch.as_tensor(loop.env.reset(seed=seed)[0], dtype=torch.float32), True, 0
    while True:
        started = steps
        for t in range(STEPS):
            obs, ended = loop.step(t, obs, ended)
            steps += 1
            clock.tick(steps, loop.act)
        loop.update(loop.advantages(obs, ended), started)
